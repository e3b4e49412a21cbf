"""Seams to training frameworks. Each module is imported by name and needs its framework alone."""
