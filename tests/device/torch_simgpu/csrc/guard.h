// What torch asks of every device: the current device and stream, events, generators, pinned memory.
#pragma once
#include "memory.h"
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <chrono>

namespace simgpu {
// A CPU's generator that says it belongs to the device; operators swap its state into the CPU's (operators.h).
struct GeneratorImpl final : at::CPUGeneratorImpl {
  explicit GeneratorImpl(Index i) {
    device_ = c10::Device(TYPE, i);
    key_set_ = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);
  }
};
inline at::Generator& default_generator(Index i) {
  static auto* all = [] {
    auto* generators = new std::vector<at::Generator>;
    for (int k = 0; k < device_count(); ++k) generators->push_back(at::make_generator<GeneratorImpl>(k));
    return generators;
  }();
  return all->at(i < 0 ? current : i);
}
inline void set_current(Index i) {
  TORCH_CHECK(i < device_count(), "SIMGPU error: invalid device ordinal ", int(i));
  if (i >= 0) current = i;
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return device_count() > 0; }
  bool hasPrimaryContext(Index i) const override { return i < device_count() && used && !forked_after_use; }
  Index deviceCount() const override { return device_count(); }
  void setCurrentDevice(Index i) const override { set_current(i); }
  Index getCurrentDevice() const override { return current; }
  Index exchangeDevice(Index i) const override {
    auto before = current;
    set_current(i);
    return before;
  }
  Index maybeExchangeDevice(Index i) const override { return exchangeDevice(i); }
  bool isPinnedPtr(const void* p) const override {
    Lock lock(mutex());
    return is_pinned_address(p);
  }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  c10::Device getDeviceFromPtr(void* p) const override {
    for (Index i = 0; i < device_count(); ++i)
      if (arena(i).owns(p)) return c10::Device(TYPE, i);
    TORCH_CHECK(false, "simgpu: not an address of a device");
  }
  const at::Generator& getDefaultGenerator(Index i) const override { return default_generator(i); }
  at::Generator getNewGenerator(Index i) const override { return at::make_generator<GeneratorImpl>(i < 0 ? current : i); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    auto before = exchangeDevice(storage.device().index());
    auto data = allocator.allocate(bytes);
    {
      Lock lock(mutex());
      int k = current_key(current);
      run(k);
      touch(storage.data(), k, false, "resize_");
      touch(data.get(), k, true, "resize_");
      if (auto kept = std::min(bytes, storage.nbytes())) std::memcpy(host(data.get()), host(storage.data()), kept);
    }
    storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(data));
    storage.unsafeGetStorageImpl()->set_nbytes(bytes);
    exchangeDevice(before);
  }
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return TYPE; }
  c10::Device getDevice() const override { return c10::Device(TYPE, current); }
  void setDevice(c10::Device d) const override { set_current(d.index()); }
  c10::Device exchangeDevice(c10::Device d) const override {
    auto before = getDevice();
    setDevice(d);
    return before;
  }
  void uncheckedSetDevice(c10::Device d) const noexcept override {
    if (d.index() >= 0 && d.index() < device_count()) current = d.index();
  }
  Index deviceCount() const noexcept override { return device_count(); }
  static c10::Stream stream(c10::Device d, int64_t id) {
    return c10::Stream(c10::Stream::UNSAFE, c10::Device(TYPE, d.index() < 0 ? current : d.index()), id);
  }
  c10::Stream getStream(c10::Device d) const override { return stream(d, streams.at(d.index() < 0 ? current : d.index())); }
  c10::Stream getDefaultStream(c10::Device d) const override { return stream(d, 0); }
  c10::Stream getStreamFromGlobalPool(c10::Device d, bool = false) const override { return getNewStream(d); }
  c10::Stream getNewStream(c10::Device d, int = 0) const override {
    static std::atomic<int64_t> made{0};
    return stream(d, 1 + made++ % 32);  // a pool, as torch.cuda has
  }
  c10::Stream exchangeStream(c10::Stream s) const override {
    auto before = getStream(s.device());
    streams.at(s.device_index()) = s.id();
    return before;
  }
  void record(void** event, const c10::Stream& s, const Index, const c10::EventFlag) const override {
    Lock lock(mutex());
    if (!*event) *event = new Event;
    auto& e = *static_cast<Event*>(*event);
    auto now = std::chrono::steady_clock::now().time_since_epoch();
    e.milliseconds = std::chrono::duration<double, std::milli>(now).count();
    e.stream = key(s);
    e.queries = 0;
    auto& w = work(e.stream);
    join(w.clock, host_clock());
    e.tick = w.tick;
    e.clock = w.clock;
  }
  void block(void* event, const c10::Stream& s) const override {
    if (!event) return;
    Lock lock(mutex());
    auto& e = *static_cast<Event*>(event);
    ++counters[WAITS];
    wait_for(key(s), e.stream, e.tick, e.clock);
  }
  // A program that polls sees the event not yet done a few times, and must neither give up nor go on without it.
  bool queryEvent(void* event) const override {
    if (!event) return true;
    Lock lock(mutex());
    auto& e = *static_cast<Event*>(event);
    if (at(host_clock(), e.stream) >= e.tick) return true;
    if (++e.queries <= 3) return false;
    host_waits(e.stream, e.tick, e.clock);
    return true;
  }
  bool queryStream(const c10::Stream& s) const override {
    Lock lock(mutex());
    static std::map<int, int> queries;
    int k = key(s);
    if (at(host_clock(), k) >= work(k).tick) return true;
    if (++queries[k] <= 3) return false;
    queries[k] = 0;
    host_waits(k);
    return true;
  }
  void destroyEvent(void* event, const Index) const noexcept override { delete static_cast<Event*>(event); }
  void synchronizeEvent(void* event) const override {
    if (!event) return;
    Lock lock(mutex());
    auto& e = *static_cast<Event*>(event);
    host_waits(e.stream, e.tick, e.clock);
  }
  void synchronizeStream(const c10::Stream& s) const override {
    Lock lock(mutex());
    host_waits(key(s));
  }
  void synchronizeDevice(const Index d) const override {
    Lock lock(mutex());
    host_waits_for_device(d < 0 ? current : d);
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& s) const override { allocator.recordStream(data, s); }
  double elapsedTime(void* a, void* b, const Index) const override {
    return static_cast<Event*>(b)->milliseconds - static_cast<Event*>(a)->milliseconds;
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);
}  // namespace simgpu
