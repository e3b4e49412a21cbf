"""What setup.py needs to build the native modules. Not installed."""
