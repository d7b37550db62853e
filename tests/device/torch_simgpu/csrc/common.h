// What every part of the simulated device shares: its settings, and one lock.
#pragma once
#include <c10/core/Device.h>
#include <c10/core/Stream.h>
#include <c10/util/Exception.h>
#include <pthread.h>
#include <array>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <vector>

namespace simgpu {
constexpr auto TYPE = c10::DeviceType::PrivateUse1;
constexpr int MAX_DEVICES = 16;
using Index = c10::DeviceIndex;

inline int64_t setting(const char* name, int64_t otherwise) {
  const char* value = std::getenv(name);
  return value && *value ? std::atoll(value) : otherwise;
}

inline int device_count() {
  static const int count = [] {
    auto n = setting("SIMGPU_DEVICES", 2);
    TORCH_CHECK(n >= 0 && n <= MAX_DEVICES, "SIMGPU_DEVICES=", n, "; allowed are 0 to ", MAX_DEVICES);
    if (const char* visible = std::getenv("SIMGPU_VISIBLE_DEVICES")) {  // "0,1": up to the first that does not exist, as with CUDA
      int64_t seen = 0;
      for (const char* entry = visible; *entry; ++entry) {
        auto index = std::strtoll(entry, const_cast<char**>(&entry), 10);
        if (index < 0 || index >= n || (*entry && *entry != ',')) break;
        ++seen;
        if (!*entry) break;
      }
      n = seen;
    }
    return int(n);
  }();
  return count;
}

// Of each thread: the current device, and the current stream of each device. `inside` is above 0 while an operator runs on
// the host: the copies that it makes are parts of it, and not copies that a program asked for.
inline thread_local Index current = 0;
inline thread_local std::array<int64_t, MAX_DEVICES> streams{};
inline thread_local int inside = 0;

// Guards everything below. A thread may need the GIL while it holds the lock: to count a reference to a tensor that Python
// has, too. So a thread that has the GIL (torch records events with it) gives it back while it waits for the lock.
extern "C" {
int PyGILState_Check() __attribute__((weak));
void* PyEval_SaveThread() __attribute__((weak));
void PyEval_RestoreThread(void*) __attribute__((weak));
}

template <class Mutex>
class WithoutGil {
 public:
  explicit WithoutGil(Mutex& mutex) : mutex_(mutex) {
    if (mutex_.try_lock()) return;
    void* state = PyGILState_Check && PyGILState_Check() ? PyEval_SaveThread() : nullptr;
    mutex_.lock();
    if (state) PyEval_RestoreThread(state);
  }
  ~WithoutGil() { mutex_.unlock(); }
  WithoutGil(const WithoutGil&) = delete;

 private:
  Mutex& mutex_;
};

inline std::recursive_mutex& mutex() {
  static auto* m = new std::recursive_mutex;
  return *m;
}
using Lock = WithoutGil<std::recursive_mutex>;

// As with CUDA: a device that was used before a fork cannot be used by the child.
inline bool used = false, forked_after_use = false;
inline void use() {
  if (used && !forked_after_use) return;
  TORCH_CHECK(!forked_after_use, "Cannot re-initialize simgpu in forked subprocess. Use the 'spawn' start method.");
  static const int handler = pthread_atfork(nullptr, nullptr, [] { forked_after_use = used; });
  (void)handler;
  used = true;
}

enum Counter { QUEUED, LATE, SNAPSHOTS, WAITS, EARLY_FREES, PINNED_KEPT, BLOCKS_KEPT, BLOCKING, COUNTERS };
inline std::array<int64_t, COUNTERS> counters{};
inline std::array<int64_t, 3> transfers{};  // host to device, device to host, device to device
}  // namespace simgpu
