// Operators. Creation, copies and views are written here; everything else is checked as kernels of a GPU check, and computed on the CPU.
#pragma once
#include "guard.h"
#include <ATen/EmptyTensor.h>
#include <ATen/core/op_registration/adaption.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_local_scalar_dense_native.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/convolution_backward.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/histc.h>
#include <ATen/ops/set_native.h>
#include <unordered_set>

namespace simgpu {
using at::Tensor;
using c10::IntArrayRef;
template <class T> using Optional = std::optional<T>;

struct Inside {
  Inside() { ++inside; }
  ~Inside() { --inside; }
};
inline bool on_device(const Tensor& t) { return t.defined() && t.device().type() == TYPE; }
inline const void* storage_address(const Tensor& t) { return t.storage().data(); }
inline Span span(const Tensor& t) {
  return {host(t.const_data_ptr()), t.sizes().vec(), t.strides().vec(), t.scalar_type()};
}
// The same bytes as a CPU tensor. Valid as long as `t` is.
inline Tensor on_host(const Tensor& t) { return on_device(t) ? span(t).tensor() : t; }

// An operator that reads and writes these, on the current stream.
inline void operation(Index device, const char* name, std::initializer_list<Tensor> reads, std::initializer_list<Tensor> writes) {
  if (inside) return;
  Lock lock(mutex());
  int k = current_key(device);
  run(k);
  for (auto& t : reads) if (on_device(t)) touch(storage_address(t), k, false, name);
  for (auto& t : writes) if (on_device(t)) touch(storage_address(t), k, true, name);
}

inline Tensor empty(IntArrayRef size, Optional<at::ScalarType> dtype, Optional<at::Layout>, Optional<c10::Device> device,
                    Optional<bool>, Optional<at::MemoryFormat> format) {
  const c10::DeviceGuard guard(c10::device_or_default(device));
  return at::detail::empty_generic(size, &allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype), format);
}
inline Tensor empty_strided(IntArrayRef size, IntArrayRef stride, Optional<at::ScalarType> dtype, Optional<at::Layout>,
                            Optional<c10::Device> device, Optional<bool>) {
  const c10::DeviceGuard guard(c10::device_or_default(device));
  return at::detail::empty_strided_generic(size, stride, &allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype));
}

// Queue a copy on stream `k`.
inline void queue_copy(int k, const Tensor& from, const Tensor& to, std::shared_ptr<char[]> snapshot, const void* pinned, const char* name) {
  auto tick = submit(k);
  if (on_device(from)) touch(storage_address(from), k, false, name);
  if (on_device(to)) touch(storage_address(to), k, true, name);
  Item item{tick, Kind::COPY, span(to), span(from), std::move(snapshot), pinned, nullptr, 0, 0, 0};
  if (item.snapshot) {
    item.from.strides = at::detail::defaultStrides(item.from.sizes);
    item.from.data = item.snapshot.get();
  }
  if (pinned) ++find_pinned(pinned)->second.copies;
  work(k).queue.push_back(std::move(item));
  ++counters[QUEUED];
}
inline void copy_between_devices(const Tensor& from, const Tensor& to, bool can_wait, const std::function<void()>& copy) {
  constexpr auto name = "copy between devices";
  int k = current_key(from.device().index()), other = current_key(to.device().index());
  wait_for(k, other, work(other).tick, work(other).clock);  // the destination is free
  if (can_wait) queue_copy(k, from, to, nullptr, nullptr, name);
  else {
    run(k);
    touch(storage_address(from), k, false, name);
    touch(storage_address(to), k, true, name);
    copy();
  }
  wait_for(other, k, work(k).tick, work(k).clock);
}
inline Tensor copy_from(const Tensor& from, const Tensor& to, bool non_blocking) {
  bool source = on_device(from), target = on_device(to);
  auto copy = [&] {
    Tensor d = on_host(to), s = on_host(from);
    if (from.is_conj() != to.is_conj()) s = s.conj();
    if (from.is_neg() != to.is_neg()) s = s.neg();
    d.copy_(s);
  };
  if (inside || to.numel() == 0) {
    copy();
    return to;
  }
  ++transfers[!source ? 0 : !target ? 1 : 2];
  bool plain = !from.is_conj() && !to.is_conj() && !from.is_neg() && !to.is_neg() && from.sizes() == to.sizes();
  Lock lock(mutex());
  int k = current_key(source ? from.device().index() : to.device().index());
  bool can_wait = late && plain;
  if (source && target && from.device() != to.device()) {
    copy_between_devices(from, to, can_wait, copy);
    return to;
  }
  auto pinned = [](const Tensor& t) { return t.is_contiguous() && is_pinned_address(storage_address(t)); };
  if (!source && non_blocking && can_wait) {
    if (pinned(from)) queue_copy(k, from, to, nullptr, storage_address(from), "copy to the device");
    else {  // the source is pageable: the driver reads it before the call returns
      std::shared_ptr<char[]> snapshot(new char[from.numel() * from.itemsize()]);
      copy_now({snapshot.get(), from.sizes().vec(), at::detail::defaultStrides(from.sizes()), from.scalar_type()}, span(from));
      ++counters[SNAPSHOTS];
      queue_copy(k, from, to, snapshot, nullptr, "copy to the device");
    }
    return to;
  }
  if (source && !target && non_blocking && can_wait && pinned(to)) {
    queue_copy(k, from, to, nullptr, storage_address(to), "copy to the host");
    return to;
  }
  run(k);
  auto name = source && target ? "copy on the device" : "blocking copy";
  if (source) touch(storage_address(from), k, false, name);
  if (target) touch(storage_address(to), k, true, name);
  if (!(source && target)) {
    host_waits(k);
    ++counters[BLOCKING];
  }
  Inside within;
  copy();
  return to;
}
inline Tensor copy_from_and_resize(const Tensor& from, const Tensor& to) {
  at::native::resize_(to, from.sizes(), std::nullopt);
  operation((on_device(from) ? from : to).device().index(), "copy", {from}, {to});
  on_host(to).copy_(on_host(from));
  return to;
}
inline at::Scalar local_scalar(const Tensor& t) {
  operation(t.device().index(), "item", {t}, {});
  Lock lock(mutex());
  host_waits(current_key(t.device().index()));
  ++counters[BLOCKING];
  return at::native::_local_scalar_dense_cpu(on_host(t));
}
inline Tensor& set_storage(Tensor& self, at::Storage storage, int64_t offset, IntArrayRef size, IntArrayRef stride) {
  return at::native::set_storage_cpu_(self, storage, offset, size, stride);
}
inline Tensor& set_nothing(Tensor& self) {
  const c10::DeviceGuard guard(self.device());
  c10::Storage storage(c10::Storage::use_byte_size_t(), 0, allocator.allocate(0), &allocator, true);
  return self.set_(storage, 0, {0}, {});
}
inline void record_stream(Tensor& t, c10::Stream stream) { allocator.recordStream(t.storage().data_ptr(), stream); }
inline bool is_pinned(const Tensor& t, Optional<c10::Device>) {
  Lock lock(mutex());
  return is_pinned_address(storage_address(t));
}
inline Tensor pin_memory(const Tensor& t, Optional<c10::Device>) {
  auto bytes = at::detail::computeStorageNbytes(t.sizes(), t.strides(), t.itemsize());
  c10::Storage storage(c10::Storage::use_byte_size_t(), bytes, pinned_allocator.allocate(bytes), &pinned_allocator, false);
  auto result = at::empty({0}, t.options().device(at::kCPU)).set_(storage, 0, t.sizes(), t.strides());
  result.copy_(t);
  return result;
}

// torch dispatches convolutions of unknown devices to operators of their own.
inline Tensor to_device(const Tensor& result, c10::Device device, const char* name) {
  if (!result.defined()) return result;
  Tensor moved;
  {
    Inside within;
    moved = result.to(device);
  }
  operation(device.index(), name, {}, {moved});
  return moved;
}
inline Tensor convolution(const Tensor& x, const Tensor& weight, const Optional<Tensor>& bias, IntArrayRef stride, IntArrayRef padding,
                          IntArrayRef dilation, bool transposed, IntArrayRef output_padding, int64_t groups) {
  const c10::DeviceGuard guard(x.device());
  auto b = bias && bias->defined() ? Optional<Tensor>(on_host(*bias)) : std::nullopt;
  operation(x.device().index(), "convolution", {x, weight, bias ? *bias : Tensor()}, {});
  return to_device(at::convolution(on_host(x), on_host(weight), b, stride, padding, dilation, transposed, output_padding, groups), x.device(), "convolution");
}
inline std::tuple<Tensor, Tensor, Tensor> convolution_backward(
    const Tensor& grad, const Tensor& x, const Tensor& weight, IntArrayRef stride, IntArrayRef padding, IntArrayRef dilation,
    bool transposed, IntArrayRef output_padding, int64_t groups, std::array<bool, 3> mask) {
  const c10::DeviceGuard guard(x.device());
  constexpr auto name = "convolution_backward";
  operation(x.device().index(), name, {grad, x, weight}, {});
  IntArrayRef bias_size{weight.size(transposed ? 1 : 0) * (transposed ? groups : 1)};
  auto [a, b, c] = at::convolution_backward(on_host(grad), on_host(x), on_host(weight), at::OptionalIntArrayRef(bias_size),
                                            stride, padding, dilation, transposed, output_padding, groups, mask);
  return {to_device(a, x.device(), name), to_device(b, x.device(), name), to_device(c, x.device(), name)};
}
// GPUs count integers too, and torch's CPU kernel does not.
inline Tensor histc(const Tensor& t, int64_t bins, const at::Scalar& low, const at::Scalar& high) {
  const c10::DeviceGuard guard(t.device());
  operation(t.device().index(), "histc", {t}, {});
  bool counts_integers = at::isIntegralType(t.scalar_type(), false);
  auto counts = at::histc(counts_integers ? on_host(t).to(at::kDouble) : on_host(t), bins, low, high).to(t.scalar_type());
  return to_device(counts, t.device(), "histc");
}

template <class F> void for_each_tensor(const c10::IValue& value, F&& visit) {
  if (value.isTensor()) visit(value.toTensor());
  else if (value.isTensorList()) for (const Tensor& t : value.toTensorList()) visit(t);
  else if (value.isOptionalTensorList()) {
    for (const Optional<Tensor>& t : value.toOptionalTensorList()) if (t) visit(*t);
  }
}
// Runs an operator with the state of a device's generator in the place of the CPU's.
struct SwappedGenerator {
  at::Generator device, cpu = at::detail::getDefaultCPUGenerator();
  Tensor saved;
  static std::mutex& one_at_a_time() { static auto* m = new std::mutex; return *m; }
  WithoutGil<std::mutex> lock{one_at_a_time()};
  explicit SwappedGenerator(at::Generator g) : device(std::move(g)) {
    TORCH_CHECK(device.device().type() == TYPE, "Expected a 'simgpu' device type for generator but found '", device.device().type(), "'");
    saved = cpu.get_state();
    cpu.set_state(device.get_state());
  }
  ~SwappedGenerator() {
    device.set_state(cpu.get_state());
    cpu.set_state(saved);
  }
};
inline Optional<c10::Device> common_device(const std::string& name, const std::vector<c10::IValue>& arguments) {
  static const std::unordered_set<std::string> cpu_indices = {"aten::index", "aten::index_put", "aten::_index_put_impl_",
                                                              "aten::index_put_", "aten::_unsafe_index", "aten::_unsafe_index_put"};
  Optional<c10::Device> device;
  auto check = [&](const Tensor& t) {
    if (!t.defined()) return;
    bool allowed = on_device(t) ? !device || *device == t.device() : t.dim() == 0 || cpu_indices.count(name);
    TORCH_CHECK(allowed && !t.is_meta(), "Expected all tensors to be on the same device, but found at least two devices, ",
                device ? *device : c10::Device(TYPE, current), " and ", t.device(), "! (when checking arguments of ", name, ")");
    if (on_device(t)) device = t.device();
  };
  for (auto& value : arguments) {
    for_each_tensor(value, check);
    if (value.isDevice() && value.toDevice().type() == TYPE && !device) device = value.toDevice();
  }
  return device;
}
// Operators whose result, or its shape, the host reads: on a GPU they wait.
inline bool host_reads(const std::string& name, const std::vector<c10::IValue>& arguments) {
  static const std::unordered_set<std::string> names = {"aten::equal", "aten::nonzero", "aten::masked_select", "aten::_unique2",
                                                        "aten::unique_dim", "aten::unique_consecutive", "aten::bincount"};
  if (names.count(name)) return true;
  if (name != "aten::index") return false;
  bool masks = false;
  for_each_tensor(arguments[1], [&](const Tensor& t) { masks = masks || (t.defined() && on_device(t) && t.scalar_type() == at::kBool); });
  return masks;
}
inline void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const auto& name = schema.name();
  auto begin = stack->size() - schema.arguments().size();
  const std::vector<c10::IValue> arguments(stack->begin() + begin, stack->end());
  auto device = common_device(name, arguments);
  const c10::OptionalDeviceGuard guard(device);
  Index index = device && device->has_index() ? device->index() : current;
  std::set<const void*> inputs;
  if (!inside) {
    Lock lock(mutex());
    int k = current_key(index);
    run(k);
    if (host_reads(name, arguments)) {
      host_waits(k);
      ++counters[BLOCKING];
    }
    for (size_t i = 0; i < arguments.size(); ++i) {
      auto* alias = schema.arguments()[i].alias_info();
      bool writes = alias && alias->isWrite();
      for_each_tensor(arguments[i], [&](const Tensor& t) {
        if (!on_device(t)) return;
        inputs.insert(storage_address(t));
        touch(storage_address(t), k, writes, name);
      });
    }
  }
  {
    Inside within;
    if (op.hasTag(at::Tag::nondeterministic_seeded)) {
      at::Generator generator = default_generator(index);
      for (size_t i = 0; i < arguments.size(); ++i) {
        if (!arguments[i].isGenerator()) continue;
        generator = arguments[i].toGenerator();
        (*stack)[begin + i] = c10::IValue();
      }
      SwappedGenerator swapped(generator);
      at::native::cpu_fallback(op, stack);
    } else at::native::cpu_fallback(op, stack);
  }
  if (inside) return;
  Lock lock(mutex());
  int k = current_key(index);
  for (size_t i = begin; i < stack->size(); ++i)
    for_each_tensor((*stack)[i], [&](const Tensor& t) {
      if (on_device(t) && !inputs.count(storage_address(t))) touch(storage_address(t), k, true, name);
    });
}
}  // namespace simgpu
