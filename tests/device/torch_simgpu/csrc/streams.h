// Streams whose copies are late, and the vector clocks that find races.
//
// A copy that CUDA may carry out later is queued, and is carried out when CUDA's rules demand that it is done: an operator runs on
// its stream (operators run at once, so everything queued before them has to), or the host waits for the stream or for an event
// of it. So whoever reads, overwrites or frees too early gets wrong numbers every time.
//
// Operators are not late, so numbers cannot show what they race with. For that, each stream and the host have a vector clock: for
// every stream, how much of its work is known to come before. Two accesses to a block race if neither comes before the other.
// (L. Lamport, "Time, clocks, and the ordering of events in a distributed system", 1978; torch.cuda._sanitizer does the same.)
#pragma once
#include "common.h"
#include <ATen/core/Tensor.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <fcntl.h>
#include <unistd.h>
#include <deque>
#include <functional>
#include <memory>

namespace simgpu {
using Clock = std::map<int, int64_t>;  // stream -> the last piece of its work that is known to be done before
inline int64_t at(const Clock& clock, int stream) {
  auto found = clock.find(stream);
  return found == clock.end() ? 0 : found->second;
}
inline void join(Clock& clock, const Clock& other) {
  for (auto& [stream, tick] : other) clock[stream] = std::max(clock[stream], tick);
}
// A stream of any device as one number.
inline int key(Index device, int64_t id) { return int(id) * MAX_DEVICES + device; }
inline int key(const c10::Stream& stream) { return key(stream.device_index(), stream.id()); }
inline int current_key(Index device) { return key(device, streams[device]); }
inline std::string stream_name(int k) {
  return "stream " + std::to_string(k / MAX_DEVICES) + " of device " + std::to_string(k % MAX_DEVICES);
}

inline bool late = setting("SIMGPU_LATE", 1);
inline std::vector<std::string>& races() {
  static auto* found = new std::vector<std::string>;
  return *found;
}
// Keep a report, and append it to the file in SIMGPU_REPORT: a test asks there for those of the processes that it started.
inline void report(const std::string& race) {
  races().push_back(race);
  if (const char* path = std::getenv("SIMGPU_REPORT")) {
    auto line = race + "\n";
    int file = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
    TORCH_CHECK(file >= 0 && write(file, line.data(), line.size()) == ssize_t(line.size()), "simgpu: cannot write ", path);
    close(file);
  }
}

// One side of a copy, at its address on the host.
struct Span {
  void* data;
  std::vector<int64_t> sizes, strides;
  at::ScalarType dtype;
  at::Tensor tensor() const { return at::from_blob(data, sizes, strides, at::TensorOptions().dtype(dtype)); }
};
inline bool is_dense(const Span& span) {
  int64_t expected = 1;
  for (size_t i = span.sizes.size(); i-- > 0;) {
    if (span.sizes[i] != 1 && span.strides[i] != expected) return false;
    expected *= span.sizes[i];
  }
  return true;
}
inline void copy_now(const Span& to, const Span& from) {
  if (to.dtype == from.dtype && to.sizes == from.sizes && is_dense(to) && is_dense(from)) {
    std::memcpy(to.data, from.data, c10::multiply_integers(to.sizes) * c10::elementSize(to.dtype));
    return;
  }
  // Not seen by modes of Python (FakeTensorMode, ...): this runs inside of operators that they have nothing to do with.
  c10::impl::ExcludeDispatchKeyGuard unseen(c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot}));
  c10::InferenceMode guard(true);
  to.tensor().copy_(from.tensor());
}

enum class Kind { COPY, WAIT, POISON };
struct Item {
  int64_t tick;
  Kind kind;
  Span to, from;                    // of a copy
  std::shared_ptr<char[]> snapshot; // what `from` points to, if the program may reuse its source at once
  const void* pinned;               // the pinned block that may not be reused before
  void* block; size_t bytes;        // of memory to poison
  int other; int64_t other_tick;    // of a stream to wait for
};
struct Work {
  std::deque<Item> queue;
  int64_t tick = 0;  // of the last piece of work
  Clock clock;
};
inline Work& work(int k) {
  static auto* all = new std::map<int, Work>;
  return (*all)[k];
}
inline std::vector<int>& known_streams() {
  static auto* all = new std::vector<int>;
  return *all;
}
inline Clock& host_clock() {
  static auto* clock = new Clock;
  return *clock;
}

// Memory that was never written, or was freed: NaN as any floating point type, and out of range as any index.
inline void poison(void* data, size_t bytes) {
  auto* word = static_cast<uint16_t*>(data);
  std::fill(word, word + bytes / 2, uint16_t(0xFFFE));
}
void unpin(const void* block);  // memory.h

// Carry out what is queued on a stream up to a tick, in order.
inline void execute(int k, int64_t upto) {
  auto& queue = work(k).queue;
  while (!queue.empty() && queue.front().tick <= upto) {
    Item item = std::move(queue.front());
    queue.pop_front();
    if (item.kind == Kind::COPY) {
      copy_now(item.to, item.from);
      ++counters[LATE];
      if (item.pinned) unpin(item.pinned);
    } else if (item.kind == Kind::WAIT) execute(item.other, item.other_tick);
    else poison(item.block, item.bytes);
  }
}
// A new piece of work on a stream: it comes after what the host knows to be done.
inline int64_t submit(int k) {
  auto& w = work(k);
  if (w.tick == 0) known_streams().push_back(k);
  join(w.clock, host_clock());
  return w.clock[k] = ++w.tick;
}
inline void run(int k) { execute(k, submit(k)); }
inline void wait_for(int k, int other, int64_t tick, const Clock& clock) {
  join(work(k).clock, clock);
  auto when = submit(k);
  if (k != other) work(k).queue.push_back(Item{when, Kind::WAIT, {}, {}, nullptr, nullptr, nullptr, 0, other, tick});
}
inline void host_waits(int k, int64_t tick, const Clock& clock) {
  execute(k, tick);
  join(host_clock(), clock);
  host_clock()[k] = std::max(host_clock()[k], tick);
}
inline void host_waits(int k) {
  auto& w = work(k);
  host_waits(k, w.tick, w.clock);
}
inline void host_waits_for_device(Index device) {
  auto all = known_streams();
  for (int k : all)
    if (k % MAX_DEVICES == device) host_waits(k);
}

struct Event {
  double milliseconds = 0;
  int stream = 0, queries = 0;
  int64_t tick = 0;
  Clock clock;
};
}  // namespace simgpu
