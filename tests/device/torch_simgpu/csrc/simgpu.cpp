// A device named "simgpu" (torch.utils.rename_privateuse1_backend) in the memory of the host, for tests of what GPUs demand.
#include "operators.h"
#include <ATen/autocast_mode.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <torch/library.h>

namespace simgpu {
const at::Tensor& resize(const at::Tensor& t, c10::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  const c10::DeviceGuard guard(t.device());
  return at::native::resize_(t, size, format);
}
TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", local_scalar);
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("view", at::native::view);
  m.impl("unfold", at::native::unfold);
  m.impl("view_as_real", at::native::view_as_real);
  m.impl("view_as_complex", at::native::view_as_complex);
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("resize_", resize);
  m.impl("set_.source_Tensor", at::native::set_tensor_);
  m.impl("set_.source_Storage", at::native::set_);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("set_", set_nothing);
  m.impl("convolution_overrideable", convolution);
  m.impl("convolution_backward_overrideable", convolution_backward);
  m.impl("histc", histc);
  m.impl("record_stream", record_stream);
  m.impl("is_pinned", is_pinned);
  m.impl("_pin_memory", pin_memory);
  // Without this, module.to(device) makes new parameters: see torch.__future__.set_overwrite_module_params_on_conversion.
  m.impl("_has_compatible_shallow_copy_type", [](const at::Tensor&, const at::Tensor&) { return true; });
}
TORCH_LIBRARY_IMPL(_, AutogradPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

// A copy that resolves them is made of a copy: torch's fallbacks would call each other without an end.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, Negative, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }

struct Registration {
  Registration() {
    c10::SetAllocator(TYPE, &allocator);
    at::RegisterPrivateUse1HooksInterface(new Hooks);
  }
} registration;

std::vector<int64_t> stats(int64_t device) {
  Lock lock(mutex());
  auto& a = arena(device);
  return {int64_t(a.used), int64_t(a.peak), int64_t(a.limit), int64_t(a.used + a.cached), a.failures,
          int64_t(a.used + a.held), int64_t(a.active_peak)};
}
std::vector<int64_t> counts() {
  Lock lock(mutex());
  std::vector<int64_t> all(counters.begin(), counters.end());
  all.insert(all.end(), transfers.begin(), transfers.end());
  return all;
}
int64_t queued() {
  Lock lock(mutex());
  int64_t copies = 0;
  for (int k : known_streams())
    for (auto& item : work(k).queue) copies += item.kind == Kind::COPY;
  return copies;
}
at::Tensor get_rng(int64_t device) { return default_generator(device).get_state(); }
TORCH_LIBRARY(simgpu, m) {
  m.def("device_count() -> int", [] { return int64_t(device_count()); });
  m.def("stats(int device) -> int[]", stats);
  m.def("reset_peak(int device) -> ()", [](int64_t device) { allocator.resetPeakStats(device); });
  m.def("set_limit(int device, int bytes) -> ()", [](int64_t device, int64_t n) { arena(device).limit = std::min<size_t>(n, ARENA); });
  m.def("empty_cache() -> ()", [] { allocator.emptyCache(); });
  m.def("counts() -> int[]", counts);
  m.def("queued() -> int", queued);
  m.def("set_late(bool on) -> ()", [](bool on) { late = on; });
  m.def("races() -> str[]", [] { Lock lock(mutex()); return races(); });
  m.def("clear_races() -> ()", [] { Lock lock(mutex()); races().clear(); });
  m.def("is_used() -> bool", [] { return used && !forked_after_use; });
  m.def("is_in_bad_fork() -> bool", [] { return forked_after_use; });
  m.def("get_rng(int device) -> Tensor", get_rng);
  m.def("set_rng(int device, Tensor state) -> ()", [](int64_t device, at::Tensor state) { default_generator(device).set_state(state); });
  m.def("seed(int device, int seed) -> ()", [](int64_t device, int64_t seed) { default_generator(device).set_current_seed(seed); });
}
}  // namespace simgpu

namespace at::autocast {  // the macros of torch's lists name what is in here
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
#define LOWER(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
  AT_FORALL_LOWER_PRECISION_FP(LOWER)
#undef LOWER
#define FP32(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
  AT_FORALL_FP32(FP32)
#undef FP32
#define FP32_DTYPE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
  AT_FORALL_FP32_SET_OPT_DTYPE(FP32_DTYPE)
#undef FP32_DTYPE
#define PROMOTE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)
  AT_FORALL_PROMOTE(PROMOTE)
#undef PROMOTE
}
}  // namespace at::autocast
