// The engine under random loops, for the thread and address sanitizers: units of every placement
// are walked forward and backward, gradients leave, updates run ahead, are taken back, kept or run
// late, the user looks in between, the engine is closed with work in flight. Each unit's memory
// holds one number everywhere: how many updates it has had. A lost, doubled or early update, or an
// upload of old bytes, shows as a wrong number.
#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstring>
#include <future>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "csrc/device/host_device.h"
#include "csrc/device/host_store.h"
#include "csrc/runtime/engine.h"
#include "csrc/runtime/update_lane.h"
#include "tests/native/side.h"

namespace autohete::testing {
namespace {

using Word = std::uint32_t;
constexpr std::size_t kParameters = 100;  // of a unit, where the CPU lane is as slow as a rate

std::size_t words_of(const BlockPtr& block) { return block->bytes() / sizeof(Word); }
Word* data_of(const BlockPtr& block) { return reinterpret_cast<Word*>(block->data()); }
void fill(const BlockPtr& block, Word value) {
  std::fill_n(data_of(block), words_of(block), value);
}

// One unit and what is expected of it.
struct Layer {
  UnitBlocks blocks;
  BlockPtr spare;      // of params_host
  BlockPtr gradients;  // on the device
  Word updates = 0;    // that step() has asked for
  bool offered = false;
};

class Loop {
 public:
  Loop(unsigned seed, int num_layers, EngineOptions options) : random_(seed) {
    device_.link(kUp).set_random_delays(seed, 2e-5);
    device_.link(kDown).set_random_delays(seed + 1, 2e-5);
    store_.set_poison(true);
    for (int i = 0; i < num_layers; ++i) layers_.push_back(make_layer(i));
    std::vector<UnitBlocks> blocks;
    for (const Layer& layer : layers_) blocks.push_back(layer.blocks);
    engine_.configure(std::move(blocks), options);
    if (seed % 3 == 0) engine_.set_update_rate(kParameters / 2e-5);
  }

  void step() {
    walk(Direction::kForward);
    if (random_() % 4 == 0) look();
    walk(Direction::kBackward);
    if (random_() % 4 == 0) again();
    if (random_() % 4 == 0) look();
    if (random_() % 8 == 0) return void_step();
    for (int i = 0; i < size(); ++i) commit(i);
    engine_.begin_iteration();
    if (random_() % 8 == 0) engine_.wait_idle();
    if (random_() % 4 == 0) look();
  }

  void finish() {
    engine_.synchronize();
    for (int i = 0; i < size(); ++i) check(engine_.settle(i), i);
  }

  std::uint64_t updates_ahead() { return engine_.counters().updates_ahead; }
  std::uint64_t gaps() const { return gaps_; }

 private:
  int size() const { return static_cast<int>(layers_.size()); }

  Layer make_layer(int index) {
    Layer layer;
    const std::size_t bytes = sizeof(Word) * (16 + random_() % 5000);
    layer.blocks.name = "layer " + std::to_string(index);
    layer.blocks.plan.parameters = random_() % 2 ? Tier::kHost : Tier::kDevice;
    layer.blocks.plan.gradients = layer.blocks.plan.optimizer_state = Tier::kHost;
    layer.blocks.param_bytes = bytes;
    layer.blocks.params_host = store_.allocate_host(bytes, "parameters");
    layer.spare = store_.allocate_host(bytes, "spare");
    layer.blocks.gradients_host = store_.allocate_host(bytes, "gradients");
    layer.gradients = store_.allocate_device(bytes, "gradients");
    if (layer.blocks.plan.parameters == Tier::kDevice) {
      layer.blocks.params_device = store_.allocate_device(bytes, "parameters");
      fill(layer.blocks.params_device, 0);
    }
    return layer;
  }

  void check(const BlockPtr& block, int index) const {
    const Word* data = data_of(block);
    for (std::size_t i = 0; i < layers_[index].blocks.param_bytes / sizeof(Word); ++i)
      CHECK_EQ(data[i], layers_[index].updates);
  }

  void walk(Direction direction) {
    for (int k = 0; k < size(); ++k) {
      const int i = direction == Direction::kForward ? k : size() - 1 - k;
      check(engine_.acquire(i, direction), i);
      engine_.release(i, /*edited=*/false);
      if (direction == Direction::kBackward && random_() % 8 != 0) send(i);
    }
  }

  // The gradients say which update they are for; an update that reads others has come too early or
  // too late. Some go in two parts, and the second may come after the update of the first, or after
  // that was taken back.
  void send(int index) {
    Layer& layer = layers_[index];
    engine_.wait_gradients(index);
    fill(layer.gradients, layer.updates + 1);
    layer.offered = random_() % 4 != 0;
    const std::size_t end = layer.blocks.param_bytes / sizeof(Word);
    std::size_t begin = 0;
    if (random_() % 2) {
      begin = end / (2 + random_() % 3);
      send_part(layer, index, 0, begin, /*more=*/true);
      if (random_() % 2) engine_.wait_gradients_below(1);
      if (random_() % 8 == 0) engine_.withdraw(index);
    }
    send_part(layer, index, begin, end, /*more=*/false);
    engine_.wait_gradients_below(3);
    sent_[index % sent_.size()] = true;
  }

  void send_part(const Layer& layer, int index, std::size_t begin, std::size_t end, bool more) {
    AheadWork ahead;
    if (layer.offered) {
      ahead.num_parameters = kParameters * (end - begin) * sizeof(Word) / layer.blocks.param_bytes;
      ahead.update = [from = layer.blocks.params_host, to = layer.spare,
                      gradients = layer.blocks.gradients_host, begin, end,
                      this] { update(from, to, gradients, begin, end); };
    }
    if (!more && random_() % 2) {
      ahead.measure = [gradients = layer.blocks.gradients_host] {
        for (std::size_t i = 1; i < words_of(gradients); ++i)
          CHECK_EQ(data_of(gradients)[i], data_of(gradients)[0]);
      };
    }
    const std::size_t at = begin * sizeof(Word);
    engine_.send_gradients(index,
                           {{layer.blocks.gradients_host->data() + at, layer.gradients->data() + at,
                             (end - begin) * sizeof(Word)}},
                           std::move(ahead), more);
  }

  void update(const BlockPtr& from, const BlockPtr& to, const BlockPtr& gradients) {
    update(from, to, gradients, 0, words_of(from));
  }

  // Gives way in the middle, as the updates of large units do.
  void update(const BlockPtr& from, const BlockPtr& to, const BlockPtr& gradients,
              std::size_t begin, std::size_t end) {
    const std::size_t half = begin + (end - begin) / 2;
    for (std::size_t i = begin; i < half; ++i) data_of(to)[i] = data_of(from)[i] + 1;
    const std::uint64_t before = updates_run_;
    for (int k = 0; k < 3; ++k, std::this_thread::yield()) engine_.give_way(0);
    if (updates_run_ != before) ++gaps_;
    for (std::size_t i = half; i < end; ++i) data_of(to)[i] = data_of(from)[i] + 1;
    ++updates_run_;
    for (const std::size_t i : {begin, end - 1})
      if (data_of(to)[i] != data_of(gradients)[i])
        throw std::runtime_error("an update read gradients of another step");
  }

  void look() {
    const int i = static_cast<int>(random_() % layers_.size());
    engine_.withdraw(i);
    layers_[i].offered = false;
    check(engine_.settle(i), i);
    engine_.take_back();
  }

  // A second backward: what ran ahead is void, whether the loop says so or the engine finds out.
  void again() {
    if (random_() % 2) {
      for (int i = 0; i < size(); ++i) engine_.withdraw(i);
      for (Layer& layer : layers_) layer.offered = false;
    }
    walk(Direction::kBackward);
  }

  void void_step() {
    for (int i = 0; i < size(); ++i) {
      if (random_() % 2) engine_.rest_ahead(i);
      engine_.withdraw(i);
      layers_[i].offered = false;
    }
  }

  void commit(int index) {
    Layer& layer = layers_[index];
    if (!std::exchange(sent_[index % sent_.size()], false)) {
      engine_.withdraw(index);
      layer.offered = false;
      return;
    }
    if (random_() % 4 == 0) engine_.rest_ahead(index);
    ++layer.updates;
    const bool offered = std::exchange(layer.offered, false);
    if (offered && random_() % 8 != 0 && engine_.keep_ahead(index)) {
      std::swap(layer.blocks.params_host, layer.spare);
      const bool always = random_() % 4 == 0;
      engine_.commit_ahead(
          index, layer.blocks.params_host,
          [from = layer.spare, to = layer.blocks.params_host,
           gradients = layer.blocks.gradients_host, this] { update(from, to, gradients); },
          always);
      return;
    }
    engine_.commit(
        index,
        [home = layer.blocks.params_host, gradients = layer.blocks.gradients_host, this] {
          update(home, home, gradients);
        },
        kParameters);
  }

  std::mt19937 random_;
  std::shared_ptr<Budget> device_budget_ = std::make_shared<Budget>(64 << 20);
  std::shared_ptr<Budget> host_budget_ = std::make_shared<Budget>(64 << 20);
  HostDevice device_{device_budget_};
  HostStore store_{{device_budget_, host_budget_, true, {}}};
  std::vector<Layer> layers_;
  std::array<bool, 64> sent_{};
  std::uint64_t updates_run_ = 0;       // CPU lane's thread only
  std::atomic<std::uint64_t> gaps_{0};  // in updates, in which others ran
  Engine engine_{device_, store_};
};

EngineOptions options_for(unsigned seed) {
  EngineOptions options;
  options.window = 1 + static_cast<int>(seed % 3);
  options.chunk_bytes = std::size_t{1} << 12;
  options.priority_order = seed % 4 != 1;
  options.synchronous_moves = seed % 8 == 2;
  return options;
}

TEST_CASE("in random loops every update happens once, and is seen by whoever comes after it") {
  std::uint64_t ahead = 0, gaps = 0;
  for (unsigned seed = 0; seed < 40; ++seed) {
    Loop loop(seed, 1 + static_cast<int>(seed % 9), options_for(seed));
    for (int step = 0; step < 25; ++step) loop.step();
    loop.finish();
    ahead += loop.updates_ahead();
    gaps += loop.gaps();
  }
  CHECK(ahead > 100);  // of some 5000; how many depends on how busy the machine is
  CHECK(gaps > 0);
}

TEST_CASE("in 100000 random schedules no task is lost, doubled or run before its inputs") {
  for (unsigned seed = 1000; seed < 3000; ++seed) {
    Loop loop(seed, 1 + static_cast<int>(seed % 5), options_for(seed));
    for (int step = 0; step < 50; ++step) loop.step();
    loop.finish();
  }
}

TEST_CASE("a job that gives way lets more urgent ones pass, and no others") {
  UpdateLane lane;
  std::vector<int> order;  // lane's thread only, until the last job
  std::promise<void> started, others_wait, last;
  lane.push(5, [&](UpdateLane& here) {
    started.set_value();
    others_wait.get_future().wait();
    here.give_way();
    order.push_back(50);
  });
  started.get_future().wait();
  const auto note = [&](int number) {
    return [&order, number](UpdateLane&) { order.push_back(number); };
  };
  lane.push(7, [&](UpdateLane&) { last.set_value(); });
  lane.push(5, note(51));
  lane.push(3, [&](UpdateLane& here) {
    order.push_back(30);
    here.give_way();  // what is left is not more urgent
    order.push_back(31);
  });
  lane.push(1, note(10));
  others_wait.set_value();
  last.get_future().wait();
  CHECK(order == std::vector<int>({10, 30, 31, 50, 51}));
}

TEST_CASE("a job that only passes time is woken by a more urgent one, by the end and by closing") {
  const auto now = std::chrono::steady_clock::now();
  std::promise<bool> at_its_end, when_another_came, started;
  {
    UpdateLane lane;
    lane.push(5, [&](UpdateLane& here) {
      at_its_end.set_value(here.wait_for_more_urgent(now));
      when_another_came.set_value(here.wait_for_more_urgent(now + std::chrono::hours(1)));
    });
    CHECK(!at_its_end.get_future().get());
    lane.push(7, [](UpdateLane&) {});
    lane.push(3, [](UpdateLane&) {});
    CHECK(when_another_came.get_future().get());
    lane.push(1, [&](UpdateLane& here) {
      started.set_value(true);
      CHECK(!here.wait_for_more_urgent(now + std::chrono::hours(1)));
    });
    started.get_future().wait();
  }
}

TEST_CASE("an update at a stated rate lets more urgent ones pass, and does not hold up the end") {
  const auto budget = std::make_shared<Budget>(1 << 20);
  HostDevice device(budget);
  HostStore store({budget, budget, true, {}});
  std::promise<void> first, second;
  Engine engine(device, store);
  std::vector<UnitBlocks> units(2);
  for (UnitBlocks& unit : units) {
    unit.plan.parameters = unit.plan.gradients = unit.plan.optimizer_state = Tier::kHost;
    unit.param_bytes = 64;
    unit.params_host = store.allocate_host(64, "parameters");
    unit.gradients_host = store.allocate_host(64, "gradients");
  }
  engine.configure(std::move(units), {});
  engine.set_update_rate(1);  // an hour for each
  const std::size_t an_hour = 3600;
  engine.send_gradients(1, {});
  engine.commit(1, [&] { first.set_value(); }, an_hour);
  first.get_future().wait();
  engine.send_gradients(0, {});
  engine.commit(0, [&] { second.set_value(); }, an_hour);
  second.get_future().wait();
  CHECK(engine.state(0).progress == Progress::kUpdating);
  CHECK(engine.state(1).progress == Progress::kUpdating);
}

TEST_CASE("two threads that wait for different units both go on") {
  const auto budget = std::make_shared<Budget>(1 << 20);
  HostDevice device(budget);
  HostStore store({budget, budget, true, {}});
  std::promise<void> started, go;
  Engine engine(device, store);
  std::vector<UnitBlocks> units(2);
  for (UnitBlocks& unit : units) {
    unit.plan.parameters = unit.plan.gradients = unit.plan.optimizer_state = Tier::kHost;
    unit.param_bytes = 64;
    unit.params_host = store.allocate_host(64, "parameters");
    unit.gradients_host = store.allocate_host(64, "gradients");
  }
  HostLink& link = device.link(CopyDirection::kHostToDevice);
  int ticks = 0;  // of settle(), which is sure to wait by the second
  engine.set_wait_tick([&] {
    if (++ticks == 2) link.release_all();
  });
  engine.configure(std::move(units), {});
  AheadWork ahead;
  ahead.update = [&] {
    started.set_value();
    go.get_future().wait();
  };
  engine.send_gradients(1, {}, std::move(ahead));
  started.get_future().wait();
  link.hold();
  engine.begin_iteration();
  std::thread other([&] { CHECK(engine.withdraw(1, /*ticking=*/false)); });
  engine.settle(0);
  go.set_value();
  other.join();
  CHECK(ticks >= 2);
}

// An engine of one unit whose parameters, gradients and state are on the host.
struct OneUnit {
  static constexpr std::size_t kBytes = 128;
  std::shared_ptr<Budget> budget = std::make_shared<Budget>(1 << 20);
  HostDevice device{budget};
  HostStore store{{budget, budget, true, {}}};
  BlockPtr to = store.allocate_host(kBytes, "gradients");
  BlockPtr gradients = store.allocate_device(kBytes, "gradients");
  BlockPtr spare = store.allocate_host(kBytes, "spare");
  Engine engine{device, store};

  OneUnit() {
    std::vector<UnitBlocks> units(1);
    UnitPlan& plan = units[0].plan;
    plan.parameters = plan.gradients = plan.optimizer_state = Tier::kHost;
    units[0].param_bytes = kBytes;
    units[0].params_host = store.allocate_host(kBytes, "parameters");
    units[0].gradients_host = to;
    engine.configure(std::move(units), {});
  }
};

TEST_CASE(
    "an update begins when the first part of its gradients has landed, and ends with the last") {
  std::vector<int> done;  // CPU lane's thread only, until the last
  OneUnit unit;
  Engine& engine = unit.engine;
  HostLink& link = unit.device.link(CopyDirection::kDeviceToHost);
  std::byte* const to = unit.to->data();
  std::byte* const from = unit.gradients->data();
  const auto part = [&](int number, std::promise<void>& promise) {
    AheadWork work;
    work.update = [&, number] { done.push_back(number), promise.set_value(); };
    return work;
  };
  for (int step = 0; step < 2; ++step) {
    std::promise<void> first, second;
    done.clear();
    engine.send_gradients(0, {{to, from, 64}}, part(1, first), /*more=*/true);
    first.get_future().wait();
    CHECK(engine.state(0).progress == Progress::kLeaving);
    link.hold();
    engine.send_gradients(0, {{to + 64, from + 64, 64}}, part(2, second));
    CHECK(engine.keep_ahead(0));
    engine.commit_ahead(0, unit.spare, [&] { done.push_back(3); }, step == 1);
    CHECK(engine.state(0).progress == Progress::kCommitted);
    CHECK_EQ(done.size(), 1u);
    link.release_all();
    engine.synchronize();
    CHECK(done == (step == 1 ? std::vector<int>{1, 2, 3} : std::vector<int>{1, 2}));
  }
}

TEST_CASE("an update whose last gradients need none ends when those have landed, too") {
  OneUnit unit;
  Engine& engine = unit.engine;
  HostLink& link = unit.device.link(CopyDirection::kDeviceToHost);
  std::byte* const to = unit.to->data();
  std::byte* const from = unit.gradients->data();
  std::promise<void> first;
  AheadWork work, norms;
  work.update = [&] { first.set_value(); };
  engine.send_gradients(0, {{to, from, 64}}, std::move(work), /*more=*/true);
  first.get_future().wait();
  bool measured = false, again = false;
  norms.measure = [&] { measured = true; };
  link.hold();
  engine.send_gradients(0, {{to + 64, from + 64, 64}}, std::move(norms));
  CHECK(engine.keep_ahead(0));
  engine.commit_ahead(0, unit.spare, [&] { again = true; }, /*always=*/false);
  CHECK(engine.state(0).progress == Progress::kCommitted);
  link.release_all();
  engine.synchronize();
  CHECK(measured);
  CHECK(!again);
}

TEST_CASE("gradients that come while earlier ones are on their way go after them") {
  OneUnit unit;
  Engine& engine = unit.engine;
  int run = 0;  // CPU lane's thread only, until the end
  for (int round = 0; round < 1000; ++round) {
    engine.send_gradients(0, {});
    engine.send_gradients(0, {});
    engine.commit(0, [&] { ++run; });
  }
  engine.synchronize();
  CHECK_EQ(run, 1000);
}

TEST_CASE("the rest of an update that was taken back is not run") {
  OneUnit unit;
  Engine& engine = unit.engine;
  std::promise<void> first;
  AheadWork work;
  work.update = [&] { first.set_value(); };
  engine.send_gradients(0, {}, std::move(work), /*more=*/true);
  first.get_future().wait();
  CHECK(engine.withdraw(0));
  bool rest = false, all = false;
  work.update = [&] { rest = true; };
  engine.send_gradients(0, {}, std::move(work));
  engine.wait_gradients(0);
  CHECK(!engine.keep_ahead(0));
  engine.commit(0, [&] { all = true; });
  engine.synchronize();
  CHECK(!rest);
  CHECK(all);
}

TEST_CASE("an engine closed with work in flight ends") {
  for (unsigned seed = 100; seed < 140; ++seed) {
    Loop loop(seed, 6, options_for(seed));
    for (unsigned step = 0; step <= seed % 4; ++step) loop.step();
  }
}

}  // namespace
}  // namespace autohete::testing

int main(int argc, char** argv) { return check::main_of_tests(argc, argv); }
