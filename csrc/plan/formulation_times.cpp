// The time rows of a formulation (formulation.h), in the order of the header.
#include <string>

#include "csrc/plan/formulation_rows.h"

namespace autohete {
namespace {

class TimeRows : RowWriter {
 public:
  explicit TimeRows(Draft& draft) : RowWriter(draft) {}

  void add() {
    add_segment_times();
    add_step_time();
  }

 private:
  const UnitSeconds& seconds(int g) const { return out_.segments[g].seconds; }
  const UnitSeconds& of_layer(int g) const { return out_.segments[g].of_layer; }

  void add_segment_times() {
    for (int g = 0; g < num_segments(); ++g) {
      const std::string tag = std::to_string(g);
      of_[g].forward = new_variable("F" + tag, kUnlimited);
      of_[g].backward = new_variable("B" + tag, kUnlimited);
      add_forward(g);
      add_backward(g);
    }
  }

  // Uploads of all but the first `window` units of the segment, which the window holds already.
  Expression streaming(int g, double times = 1) const {
    return Expression()
        .add(of_[g].p, times * seconds(g).upload)
        .add(-times * options_.window * of_layer(g).upload);
  }

  void add_forward(int g) {
    const double n = segment(g).count, f = seconds(g).forward;
    const SegmentVariables& v = of_[g];
    at_least(v.forward, Expression().add(n * f));
    at_least(v.forward, streaming(g));
    at_least(v.forward, streaming(g).add(n * f).add(v.o, -f));
  }

  void add_backward(int g) {
    const double n = segment(g).count, again = segment(g).recompute_seconds;
    const double b = seconds(g).backward, download = seconds(g).download;
    const SegmentVariables& v = of_[g];
    // The loss comes before the last segment's backward; uploads go on meanwhile.
    const double loss = g + 1 == num_segments() ? profile_.outside_seconds / out_.time_scale : 0;
    at_least(v.backward, Expression().add(n * b + loss).add(v.c, again));
    at_least(v.backward, streaming(g));
    at_least(v.backward, streaming(g).add(n * b + loss).add(v.o, -b));
    if (among_ranks()) {
      const double m = profile_.gradient_accumulation_steps, others = (m - 1) / m;
      const double exchanges = n * seconds(g).exchange / m;
      at_least(v.backward,
               Expression().add(others * (n * b + loss) + exchanges).add(v.c, others * again));
    }
    if (download > b) {  // else the buffers never run out
      Expression leaving;
      leaving.add(n * b + loss + of_layer(g).backward - 2 * of_layer(g).download);
      leaving.add(v.o, download - b);
      at_least(v.backward, leaving);
      at_least(v.backward, leaving.add(v.c, again).add(v.o, -again));
    }
  }

  void add_step_time() {
    out_.step = new_variable("T", kUnlimited);
    const double m = profile_.gradient_accumulation_steps;
    Expression compute, cpu, d2h, h2d, gather;
    compute.add(profile_.loop_seconds / out_.time_scale);
    for (int g = 0; g < num_segments(); ++g) {
      const SegmentVariables& v = of_[g];
      const UnitSeconds& s = seconds(g);
      compute.add(v.forward, m).add(v.backward, m);
      compute.add(segment(g).count * s.device_update).add(v.o, -s.device_update);
      cpu.add(v.o, s.cpu_update);
      gather.add(v.o, s.gather);
      d2h.add(v.o, m * s.download);
      h2d.add(v.o, s.upload_update).add(v.p, 2 * m * s.upload - s.upload_update);
      h2d.add(v.z, -options_.window * of_layer(g).upload);
    }
    for (const Expression& lane : {compute, cpu, d2h, h2d}) at_least(out_.step, lane);
    if (among_ranks()) at_least(out_.step, gather);
    for (int g = 0; g < num_segments(); ++g) {
      if (trainable_parameters(segment(g).unit) > 0) add_loop(g);
    }
  }

  // (m-1) sum(F+B) + what follows the segment.
  Expression around(int g, bool whole_backward) const {
    Expression sum;
    const double repeats = profile_.gradient_accumulation_steps - 1;
    for (int h = 0; h < num_segments(); ++h) {
      const bool later = h > g;
      sum.add(of_[h].forward, repeats + (later ? 1 : 0));
      sum.add(of_[h].backward, repeats + (later || whole_backward ? 1 : 0));
    }
    return sum;
  }

  bool among_ranks() const { return profile_.ranks.num_ranks > 1; }

  enum class Work { kUpdate, kUpload, kDownload, kGather };
  double work_seconds(int g, Work work) const { return work_seconds(seconds(g), work); }
  static double work_seconds(const UnitSeconds& s, Work work) {
    if (work == Work::kUpdate) return s.cpu_update;
    if (work == Work::kGather) return s.gather;
    return work == Work::kUpload ? s.upload_update : s.download;
  }
  void add_queue(Expression& sum, int end, Work work) const {
    for (int h = 0; h < end; ++h) sum.add(of_[h].o, work_seconds(h, work));
  }

  void add_loop(int g) {
    if (options_.gated) {
      add_gated_loop(g);
    } else {
      add_ungated_loop(g);
    }
    if (among_ranks()) add_gather_loop(g);
  }

  // The loops of the segment's first and last unit on the host: `loop` seconds of its own follow
  // its backward (or all of backward), behind what earlier segments queue for one lane. The last
  // unit queues behind its own segment's too, its own share of which is in `loop`.
  void add_first_and_last(int g, bool whole_backward, Work queued, double loop) {
    const SegmentVariables& v = of_[g];
    const UnitSeconds& s = seconds(g);
    const UnitSeconds& layer = of_layer(g);
    Expression first = around(g, whole_backward), last = around(g, whole_backward);
    if (whole_backward) {
      first.add(v.o, s.forward);
      last.add(v.y, layer.forward + loop - work_seconds(layer, queued));
    } else {
      first.add(v.o, s.forward + s.backward).add(v.x, segment(g).recompute_seconds);
      last.add(v.y, layer.forward + layer.backward + loop - work_seconds(layer, queued));
    }
    first.add(v.y, loop);
    add_queue(first, g, queued);
    add_queue(last, g + 1, queued);
    at_least(out_.step, first);
    at_least(out_.step, last);
  }

  // Gathers wait for the end of backward, whatever updates do; early ones for the update.
  void add_gather_loop(int g) {
    const UnitSeconds& layer = of_layer(g);
    if (profile_.ranks.early_gathers && !options_.gated) {
      const double loop = layer.download + layer.cpu_update + layer.gather + layer.upload_update;
      return add_first_and_last(g, false, Work::kGather, loop);
    }
    add_first_and_last(g, true, Work::kGather, layer.gather + layer.upload_update);
  }

  void add_ungated_loop(int g) {
    const UnitSeconds& layer = of_layer(g);
    const double loop = layer.download + layer.cpu_update + layer.gather + layer.upload_update;
    for (const Work work : {Work::kUpdate, Work::kUpload}) add_first_and_last(g, false, work, loop);
    // What was updated early goes up when the step is taken, after the whole backward.
    if (!options_.early_uploads) add_first_and_last(g, true, Work::kUpload, layer.upload_update);
    Expression stream = around(g, false);
    stream.add(streaming(g, 2)).add(of_[g].y, loop);
    add_queue(stream, g, Work::kUpdate);
    at_least(out_.step, stream);
  }

  void add_gated_loop(int g) {
    const SegmentVariables& v = of_[g];
    const UnitSeconds& s = seconds(g);
    const UnitSeconds& layer = of_layer(g);
    const double renew = layer.cpu_update + layer.gather + layer.upload_update;
    for (const Work work : {Work::kUpdate, Work::kUpload}) add_first_and_last(g, true, work, renew);
    Expression first = around(g, false), last = around(g, false);
    first.add(v.o, s.forward + s.backward).add(v.y, layer.download + renew);
    last.add(v.y, layer.forward + layer.backward + renew);
    add_queue(last, g + 1, Work::kDownload);
    at_least(out_.step, first);
    at_least(out_.step, last);
    if (g == 0 && segment(0).count * segment(0).period == 1) add_blocking();
  }

  // The first unit's gradients land after the gate has opened; by then the CPU has begun with
  // another unit's, and an update is not interrupted.
  void add_blocking() {
    const UnitSeconds& s = seconds(0);
    for (int h = 1; h < num_segments(); ++h) {
      const double blocked = of_layer(h).cpu_update;
      if (blocked <= s.download) continue;
      Expression wait = around(0, true);
      wait.add(of_[0].o, s.forward).add(of_[0].y, s.cpu_update + s.upload_update + blocked);
      wait.add(of_[h].y, blocked).add(-blocked);
      at_least(out_.step, wait);
    }
  }
};

}  // namespace

void add_time_rows(Draft& draft) { TimeRows(draft).add(); }

}  // namespace autohete
