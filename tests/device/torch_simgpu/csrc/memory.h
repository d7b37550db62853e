// Memory that the CPU cannot touch, is limited, and is never zero by accident; and pinned memory.
//
// Each device has a range of addresses without access rights, which is what tensors see, and a readable shadow at the same offsets,
// which operators use. A CPU kernel that is given a device's address ends the process, as with a GPU.
#pragma once
#include "streams.h"
#include <c10/core/CachingDeviceAllocator.h>
#include <sys/mman.h>
#include <set>

namespace simgpu {
constexpr size_t ARENA = size_t(64) << 30, ALIGNMENT = 512, CACHED = size_t(64) << 20;

struct Access { int64_t tick = 0; std::string op; };
struct Block {
  size_t bytes;
  int stream;                    // on which it was allocated, and on which it is used again after it was freed
  std::set<int> recorded{};      // by record_stream
  std::map<int, Access> reads{}; // the last of each stream
  int writer = -1;
  Access write{};
};
struct Kept { char* address; Clock needed, done; };  // done: what is known when `needed` is done
struct Suspect { int stream; Clock accesses; std::string op; };
struct Arena {
  char *address, *shadow;
  size_t limit = std::min<size_t>(setting("SIMGPU_MEMORY", int64_t(8) << 30), ARENA);
  size_t used = 0, peak = 0, cached = 0;
  size_t held = 0, active_peak = 0;  // held: freed, but not free before a stream is known to be done
  int64_t failures = 0;
  std::map<char*, Block> blocks;                            // handed out, kept or cached
  std::map<std::pair<int, size_t>, std::vector<char*>> cache;  // freed, by stream and size
  std::vector<Kept> kept;                                   // freed while recorded streams were busy
  std::map<char*, Suspect> suspects;                        // freed while other streams were busy
  std::map<char*, size_t> holes;
  Arena() {
    auto reserve = [](int protection) {
      void* p = mmap(nullptr, ARENA, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
      TORCH_CHECK(p != MAP_FAILED, "simgpu: no address space for a device");
      return static_cast<char*>(p);
    };
    address = reserve(PROT_NONE);
    shadow = reserve(PROT_READ | PROT_WRITE);
    holes[address] = ARENA;
  }
  bool owns(const void* p) const { return p >= address && p < address + ARENA; }
  char* host(const void* p) const { return shadow + (static_cast<const char*>(p) - address); }
};
inline Arena& arena(Index device) {
  static auto* all = new std::map<Index, Arena>;
  return (*all)[device];
}
inline Arena* arena_of(const void* p) {
  for (Index i = 0; p && i < device_count(); ++i)
    if (arena(i).owns(p)) return &arena(i);
  return nullptr;
}
inline void* host(const void* p) {
  auto* a = arena_of(p);
  return a ? a->host(p) : const_cast<void*>(p);
}
inline Block* block_of(const void* p) {
  auto* a = arena_of(p);
  if (!a) return nullptr;
  auto after = a->blocks.upper_bound(static_cast<char*>(const_cast<void*>(p)));
  return after == a->blocks.begin() ? nullptr : &(--after)->second;
}
inline std::string describe(const Block& b) { return std::to_string(b.bytes) + " bytes of " + stream_name(b.stream); }

// Check an access, and remember it.
inline void touch(const void* p, int k, bool writes, const std::string& op) {
  Block* b = block_of(p);
  if (!b) return;
  auto& clock = work(k).clock;
  auto check = [&](int other, const Access& access, const char* what) {
    if (other < 0 || other == k || at(clock, other) >= access.tick) return;
    report(std::string(writes ? "write" : "read") + " by " + op + " on " + stream_name(k) + " is not ordered after the " + what +
           " by " + access.op + " on " + stream_name(other) + ": " + describe(*b));
  };
  check(b->writer, b->write, "write");
  Access now{work(k).tick, op};
  if (!writes) { b->reads[k] = now; return; }
  for (auto& [other, access] : b->reads) check(other, access, "read");
  b->reads.clear();
  b->writer = k;
  b->write = now;
}
inline void poison_on(int k, void* data, size_t bytes) {
  auto& w = work(k);
  if (w.queue.empty()) poison(data, bytes);
  else w.queue.push_back(Item{w.tick, Kind::POISON, {}, {}, nullptr, nullptr, data, bytes, 0, 0});
}
// Give whole pages back to the system: those at the ends may hold other blocks.
inline void discard(char* data, size_t bytes) {
  constexpr uintptr_t PAGE = 4096;
  auto begin = (reinterpret_cast<uintptr_t>(data) + PAGE - 1) / PAGE * PAGE;
  auto end = (reinterpret_cast<uintptr_t>(data) + bytes) / PAGE * PAGE;
  if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_DONTNEED);
}
// Return cached blocks whose stream has nothing queued, and join holes that meet.
inline void trim(Arena& a) {
  for (auto& [where, addresses] : a.cache) {
    if (!work(where.first).queue.empty()) continue;
    std::vector<char*> staying;
    for (char* p : addresses) {
      if (a.suspects.count(p)) {
        staying.push_back(p);
        continue;
      }
      discard(a.host(p), where.second);
      a.cached -= where.second;
      a.blocks.erase(p);
      auto hole = a.holes.emplace(p, where.second).first;
      auto next = std::next(hole);
      if (next != a.holes.end() && hole->first + hole->second == next->first) { hole->second += next->second; a.holes.erase(next); }
      if (hole != a.holes.begin()) {
        auto before = std::prev(hole);
        if (before->first + before->second == hole->first) { before->second += hole->second; a.holes.erase(hole); }
      }
    }
    addresses.swap(staying);
  }
}
inline void into_cache(Arena& a, char* p) {
  auto& b = a.blocks.at(p);
  a.cache[{b.stream, b.bytes}].push_back(p);
  a.cached += b.bytes;
  if (a.cached > CACHED) trim(a);
}
inline void release(void* pointer) {
  if (!pointer) return;
  Lock lock(mutex());
  auto& a = *arena_of(pointer);
  auto* p = static_cast<char*>(pointer);
  auto& b = a.blocks.at(p);
  a.used -= b.bytes;
  // Work of the block's own stream, and of those in record_stream, delays the reuse. All other work has to be ordered before the
  // next allocation on the block's stream, which may be given this memory (check_suspects).
  Clock ordered = work(b.stream).clock;
  join(ordered, host_clock());
  Suspect suspect{b.stream, {}, ""};
  auto check = [&](int other, const Access& access) {
    bool safe = other < 0 || other == b.stream || b.recorded.count(other) || at(ordered, other) >= access.tick;
    if (safe) return;
    suspect.accesses[other] = access.tick;
    suspect.op = access.op + " on " + stream_name(other);
  };
  check(b.writer, b.write);
  for (auto& [other, access] : b.reads) check(other, access);
  if (!suspect.accesses.empty()) a.suspects[p] = suspect;
  Clock needed, done;
  for (int other : b.recorded) {
    if (other == b.stream || at(host_clock(), other) >= work(other).tick) continue;
    needed[other] = work(other).tick;
    join(done, work(other).clock);
  }
  if (needed.empty()) into_cache(a, p);
  else {
    ++counters[BLOCKS_KEPT];
    a.held += b.bytes;
    a.kept.push_back({p, needed, done});
  }
}
inline void collect(Arena& a) {  // blocks whose recorded streams are known to be done
  std::vector<Kept> still;
  for (auto& item : a.kept) {
    bool done = true;
    for (auto& [other, tick] : item.needed) done = done && at(host_clock(), other) >= tick;
    if (done) { a.held -= a.blocks.at(item.address).bytes; into_cache(a, item.address); }
    else still.push_back(item);
  }
  a.kept.swap(still);
}
// As torch.cuda.empty_cache: the host waits for the streams in record_stream of freed blocks, and for nothing else. (The driver happens
// to wait for the device when a whole segment is given back; nothing promises that, and a segment with another block in it stays.)
inline void give_back(Arena& a) {
  for (auto& item : a.kept) {
    for (auto& [other, tick] : item.needed) execute(other, tick);
    join(host_clock(), item.done);
  }
  collect(a);
  trim(a);
}
// An allocation on a stream may be given any block that was freed on it: report those that are still in use, and overwrite them.
inline void check_suspects(Arena& a, int k) {
  Clock ordered = work(k).clock;
  join(ordered, host_clock());
  for (auto item = a.suspects.begin(); item != a.suspects.end();) {
    auto& [p, suspect] = *item;
    if (suspect.stream != k) { ++item; continue; }
    bool done = true;
    for (auto& [other, tick] : suspect.accesses) done = done && at(ordered, other) >= tick;
    if (!done) {
      auto& b = a.blocks.at(p);
      ++counters[EARLY_FREES];
      report("freed without record_stream, and used again, while in use by " + suspect.op + ": " + describe(b));
      poison(a.host(p), b.bytes);
    }
    item = a.suspects.erase(item);
  }
}
inline std::string mebibytes(double n) {
  char text[64];
  snprintf(text, sizeof text, n < (1 << 30) ? "%.2f MiB" : "%.2f GiB", n < (1 << 30) ? n / 1048576 : n / 1073741824);
  return text;
}
inline char* take(Arena& a, Index device, int k, size_t bytes) {
  collect(a);
  check_suspects(a, k);
  if (a.used + bytes > a.limit) {
    ++a.failures;
    TORCH_CHECK_WITH(OutOfMemoryError, false, "SIMGPU out of memory. Tried to allocate ", mebibytes(bytes), ". Device ", int(device),
      " has a total capacity of ", mebibytes(a.limit), " of which ", mebibytes(a.limit - a.used), " is free.");
  }
  auto& cached = a.cache[{k, bytes}];
  if (!cached.empty()) {
    char* p = cached.back();
    cached.pop_back();
    a.cached -= bytes;
    auto& b = a.blocks.at(p);
    b.recorded.clear();
    poison_on(k, a.host(p), bytes);
    return p;
  }
  auto hole = a.holes.begin();
  while (hole != a.holes.end() && hole->second < bytes) ++hole;
  TORCH_CHECK_WITH(OutOfMemoryError, hole != a.holes.end(), "SIMGPU out of memory: no ", mebibytes(bytes), " in one piece");
  auto [p, size] = *hole;
  a.holes.erase(hole);
  if (size > bytes) a.holes[p + bytes] = size - bytes;
  a.blocks.emplace(p, Block{bytes, k});
  poison(a.host(p), bytes);
  return p;
}

struct Allocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    use();
    c10::Device device(TYPE, current);
    if (bytes == 0) return {nullptr, nullptr, &release, device};
    bytes = (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    Lock lock(mutex());
    auto& a = arena(current);
    char* p = take(a, current, current_key(current), bytes);
    a.used += bytes;
    a.peak = std::max(a.peak, a.used);
    a.active_peak = std::max(a.active_peak, a.used + a.held);
    return {p, p, &release, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    Lock lock(mutex());
    auto all = known_streams();
    for (int k : all) execute(k, work(k).tick);
    std::memcpy(host(to), host(from), bytes);
  }
  bool initialized() override { return used; }
  void emptyCache(c10::MempoolId_t = {0, 0}) override {
    Lock lock(mutex());
    for (Index i = 0; i < device_count(); ++i) give_back(arena(i));
  }
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    Lock lock(mutex());
    if (auto* b = block_of(data.get())) b->recorded.insert(key(stream));
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(Index device) override {
    Lock lock(mutex());
    auto& a = arena(device);
    c10::CachingDeviceAllocator::DeviceStats stats;
    stats.allocated_bytes[0].current = a.used;
    stats.allocated_bytes[0].peak = a.peak;
    stats.active_bytes[0].current = a.used + a.held;
    stats.active_bytes[0].peak = a.active_peak;
    stats.reserved_bytes[0].current = a.used + a.cached;
    stats.reserved_bytes[0].peak = std::max(a.peak, a.used + a.cached);
    stats.num_ooms = a.failures;
    return stats;
  }
  void resetAccumulatedStats(Index device) override { arena(device).failures = 0; }
  void resetPeakStats(Index device) override {
    auto& a = arena(device);
    a.peak = a.used;
    a.active_peak = a.used + a.held;
  }
  std::pair<size_t, size_t> getMemoryInfo(Index device) override {
    Lock lock(mutex());
    auto& a = arena(device);
    return {a.limit - std::min(a.used, a.limit), a.limit};
  }
};
inline Allocator allocator;

// Pinned memory. A block with queued copies is not reused before they are done, as in torch's caching host allocator.
struct Pinned { size_t bytes; int copies = 0; bool freed = false; };
inline std::map<char*, Pinned>& pinned_blocks() {
  static auto* all = new std::map<char*, Pinned>;
  return *all;
}
inline std::map<size_t, std::vector<char*>>& pinned_cache() {
  static auto* all = new std::map<size_t, std::vector<char*>>;
  return *all;
}
inline std::map<char*, Pinned>::iterator find_pinned(const void* p) {
  auto& all = pinned_blocks();
  auto found = all.upper_bound(static_cast<char*>(const_cast<void*>(p)));
  if (found == all.begin()) return all.end();
  --found;
  return p < found->first + found->second.bytes ? found : all.end();
}
inline bool is_pinned_address(const void* p) { return p && find_pinned(p) != pinned_blocks().end(); }
inline void free_pinned(std::map<char*, Pinned>::iterator block) {
  poison(block->first, block->second.bytes);
  pinned_cache()[block->second.bytes].push_back(block->first);
  pinned_blocks().erase(block);
}
inline void unpin(const void* p) {
  auto block = find_pinned(p);
  if (--block->second.copies == 0 && block->second.freed) free_pinned(block);
}
struct PinnedAllocator final : c10::Allocator {
  static void release_pinned(void* p) {
    if (!p) return;
    Lock lock(mutex());
    auto block = pinned_blocks().find(static_cast<char*>(p));
    if (!block->second.copies) return free_pinned(block);
    block->second.freed = true;
    ++counters[PINNED_KEPT];
  }
  c10::DataPtr allocate(size_t bytes) override {
    if (!bytes) return {nullptr, nullptr, &release_pinned, c10::Device(c10::kCPU)};
    bytes = (bytes + 63) / 64 * 64;
    Lock lock(mutex());
    auto& cached = pinned_cache()[bytes];
    char* p;
    if (cached.empty()) {
      p = static_cast<char*>(aligned_alloc(64, bytes));
      TORCH_CHECK(p, "simgpu: no host memory for ", bytes, " pinned bytes");
      poison(p, bytes);
    } else { p = cached.back(); cached.pop_back(); }
    pinned_blocks()[p] = Pinned{bytes};
    return {p, p, &release_pinned, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release_pinned; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
};
inline PinnedAllocator pinned_allocator;
}  // namespace simgpu
