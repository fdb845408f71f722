// A torch device without hardware: results are computed at once in host memory, and work takes time on streams as on a GPU.
//
// Each operation adds a duration to its stream: end = max(now, the stream's end, events waited for) + duration. The clock is CLOCK_MONOTONIC.
// Nothing runs in the background: an event is reached, and a stream is empty, once the clock has passed its end. Whoever reads a result
// back sleeps until then. Operations run torch's own CPU kernels. Python calls the C functions at the end by ctypes, without the GIL.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/convolution_backward.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_cpu_dispatch.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/alloc_cpu.h>
#include <torch/library.h>

#include <array>
#include <atomic>
#include <cstdlib>
#include <ctime>
#include <map>
#include <mutex>
#include <unordered_map>
#include <unordered_set>
#include <vector>

namespace {

using c10::Device, c10::DeviceIndex, c10::Stream;
constexpr auto KEY = c10::DeviceType::PrivateUse1;
constexpr DeviceIndex DEVICES = 2;
constexpr int64_t NEVER = INT64_MAX;
constexpr int64_t COMPUTE = 0, TRANSFER = 1;

// Settings and counts, as Python names them by position in __init__.py.
enum Setting { OP_NS, TO_DEVICE_NS, FROM_DEVICE_NS, KIND, EVENT_DELAY_NS, CAPTURING, SETTINGS };
enum Call { CREATE, RECORD, QUERY, ELAPSED, WAIT, SYNCHRONIZE, LAUNCH, CALLS };
const char* const CALL_NAMES[] = {"create", "record", "query", "elapsed", "wait", "synchronize", "launch"};
std::array<std::atomic<int64_t>, SETTINGS> settings{};

struct Span { int64_t begin_ns, end_ns, kind; };
struct Queue { int64_t end_ns = 0; std::vector<Span> spans; };
struct Event { int64_t at_ns = 0; bool timing = false; };
struct Calls { int64_t made = 0, until_fault = 0, faults = 0; };

std::mutex lock;
std::map<std::pair<DeviceIndex, c10::StreamId>, Queue> queues;
std::array<Calls, CALLS> calls;
std::unordered_set<const void*> pinned;
c10::StreamId streams_made = 0;
std::atomic<bool> initialized{false};
thread_local DeviceIndex current_device = 0;
thread_local std::array<c10::StreamId, DEVICES> current_stream{};
thread_local int quiet = 0;  // inside an operation's own copies to the CPU and back, which take no time

int64_t now_ns() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1'000'000'000 + now.tv_nsec;
}

void sleep_until(int64_t at_ns) {
  timespec until{at_ns / 1'000'000'000, at_ns % 1'000'000'000};
  while (at_ns > now_ns() && clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &until, nullptr) == EINTR) {}
}

// Counts a call and raises if a fault is due, or if it is illegal while a graph is captured.
void called(Call call) {
  std::lock_guard<std::mutex> held(lock);
  auto& counted = calls[call];
  ++counted.made;
  if (counted.faults && counted.until_fault && --counted.until_fault == 0) {
    if (counted.faults > 0) --counted.faults;
    counted.until_fault = counted.faults ? 1 : 0;
    TORCH_CHECK(false, "asyncdev: injected error in ", CALL_NAMES[call]);
  }
  TORCH_CHECK(!settings[CAPTURING] || call == LAUNCH, "asyncdev: ", CALL_NAMES[call], " is not permitted while a stream is capturing");
}

Stream stream_of(DeviceIndex device) {
  return Stream(Stream::UNSAFE, Device(KEY, device), current_stream[device]);
}

Queue& queue_of(const Stream& stream) {
  return queues[{stream.device_index(), stream.id()}];
}

void launch(int64_t duration_ns, int64_t kind) {
  if (quiet) return;
  called(LAUNCH);
  initialized = true;
  std::lock_guard<std::mutex> held(lock);
  auto& queue = queue_of(stream_of(current_device));
  const int64_t begin = std::max(now_ns(), queue.end_ns);
  queue.end_ns = begin + duration_ns;
  if (duration_ns <= 0) return;
  auto& spans = queue.spans;
  if (!spans.empty() && spans.back().end_ns == begin && spans.back().kind == kind) {
    spans.back().end_ns = queue.end_ns;
  } else {
    spans.push_back({begin, queue.end_ns, kind});
  }
}

int64_t end_of(const Stream& stream) {
  std::lock_guard<std::mutex> held(lock);
  return queue_of(stream).end_ns;
}

void synchronize(const Stream& stream) {
  called(SYNCHRONIZE);
  sleep_until(end_of(stream));
}

// The current stream does what was launched on it, while the host waits: a result is read, or pageable memory copied.
void finish() {
  if (!quiet) sleep_until(end_of(stream_of(current_device)));
}

bool is_pinned_pointer(const void* data) {
  std::lock_guard<std::mutex> held(lock);
  return pinned.count(data) > 0;
}

struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    initialized = true;
    void* data = size ? c10::alloc_cpu(size) : nullptr;
    return {data, data, &c10::free_cpu, Device(KEY, current_device)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &c10::free_cpu; }
  void copy_data(void* to, const void* from, size_t size) const override { default_copy_data(to, from, size); }
} device_allocator;

void free_pinned(void* data) {
  {
    std::lock_guard<std::mutex> held(lock);
    pinned.erase(data);
  }
  c10::free_cpu(data);
}

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    void* data = c10::alloc_cpu(size ? size : 1);
    std::lock_guard<std::mutex> held(lock);
    pinned.insert(data);
    return {data, data, &free_pinned, Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_pinned; }
  void copy_data(void* to, const void* from, size_t size) const override { default_copy_data(to, from, size); }
} pinned_allocator;

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return KEY; }
  Device exchangeDevice(Device device) const override {
    const auto before = current_device;
    setDevice(device);
    return {KEY, before};
  }
  Device getDevice() const override { return {KEY, current_device}; }
  void setDevice(Device device) const override {
    TORCH_CHECK(device.index() < DEVICES, "asyncdev: there is no device ", int(device.index()), ", only ", int(DEVICES));
    uncheckedSetDevice(device);
  }
  void uncheckedSetDevice(Device device) const noexcept override {
    if (device.index() >= 0) current_device = device.index();
  }
  DeviceIndex deviceCount() const noexcept override { return DEVICES; }
  Stream getStream(Device device) const override { return stream_of(device.has_index() ? device.index() : current_device); }
  Stream getDefaultStream(Device device) const override { return Stream(Stream::DEFAULT, device); }
  Stream getStreamFromGlobalPool(Device device, bool) const override { return getNewStream(device); }
  Stream getNewStream(Device device, int = 0) const override {
    initialized = true;
    std::lock_guard<std::mutex> held(lock);
    return Stream(Stream::UNSAFE, Device(KEY, device.has_index() ? device.index() : current_device), ++streams_made);
  }
  Stream exchangeStream(Stream stream) const override {
    const auto before = stream_of(stream.device_index());
    current_stream[stream.device_index()] = stream.id();
    return before;
  }
  bool queryStream(const Stream& stream) const override { return end_of(stream) <= now_ns(); }
  void synchronizeStream(const Stream& stream) const override { synchronize(stream); }
  bool isStreamCapturing(const Stream&) const override { return settings[CAPTURING]; }
  void synchronizeDevice(const DeviceIndex device) const override {
    called(SYNCHRONIZE);
    int64_t last = 0;
    {
      std::lock_guard<std::mutex> held(lock);
      for (const auto& [key, queue] : queues) {
        if (key.first == (device < 0 ? current_device : device)) last = std::max(last, queue.end_ns);
      }
    }
    sleep_until(last);
  }

  // Only timing events count, delay and fail: torch's own, in autograd and wait_stream, have no timing.
  void record(void** event, const Stream& stream, const DeviceIndex, const c10::EventFlag flag) const override {
    const bool timing = flag == c10::EventFlag::BACKEND_DEFAULT;
    initialized = true;
    if (timing) {
      if (!*event) called(CREATE);
      called(RECORD);
    }
    if (!*event) *event = new Event;
    std::lock_guard<std::mutex> held(lock);
    const int64_t delay = timing ? settings[EVENT_DELAY_NS].load() : 0;
    *static_cast<Event*>(*event) = {delay < 0 ? NEVER : std::max(now_ns(), queue_of(stream).end_ns) + delay, timing};
  }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  void block(void* event, const Stream& stream) const override {
    if (!event) return;
    if (static_cast<Event*>(event)->timing) called(WAIT);
    std::lock_guard<std::mutex> held(lock);
    auto& queue = queue_of(stream);
    queue.end_ns = std::max(queue.end_ns, static_cast<Event*>(event)->at_ns);
  }
  bool queryEvent(void* event) const override {
    if (!event) return true;
    if (static_cast<Event*>(event)->timing) called(QUERY);
    return static_cast<Event*>(event)->at_ns <= now_ns();
  }
  void synchronizeEvent(void* event) const override {
    if (!event) return;
    called(SYNCHRONIZE);
    const int64_t at = static_cast<Event*>(event)->at_ns;
    TORCH_CHECK(at != NEVER, "asyncdev: this event never completes");
    sleep_until(at);
  }
  double elapsedTime(void* first, void* second, const DeviceIndex) const override {
    const auto *begin = static_cast<Event*>(first), *end = static_cast<Event*>(second);
    TORCH_CHECK(begin->timing && end->timing, "asyncdev: both events need enable_timing=True");
    called(ELAPSED);
    return (end->at_ns - begin->at_ns) / 1e6;
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);
const Guard guard;

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return initialized; }
  DeviceIndex deviceCount() const override { return DEVICES; }
  void setCurrentDevice(DeviceIndex device) const override { guard.setDevice({KEY, device}); }
  DeviceIndex getCurrentDevice() const override { return current_device; }
  DeviceIndex exchangeDevice(DeviceIndex device) const override { return guard.exchangeDevice({KEY, device}).index(); }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override { return exchangeDevice(device); }
  bool isPinnedPtr(const void* data) const override { return is_pinned_pointer(data); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  Device getDeviceFromPtr(void*) const override { return {KEY, current_device}; }
  const at::Generator& getDefaultGenerator(DeviceIndex) const override { return at::detail::getDefaultCPUGenerator(); }
  at::Generator getNewGenerator(DeviceIndex) const override { return at::detail::createCPUGenerator(); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    auto data = device_allocator.allocate(size);
    if (size) std::memcpy(data.get(), storage.data(), std::min(size, storage.nbytes()));
    storage.set_data_ptr(std::move(data));
    storage.set_nbytes(size);
  }
};

// Returns the same memory as a tensor of the CPU.
at::Tensor on_host(const at::Tensor& tensor) {
  if (tensor.is_cpu()) return tensor;
  return at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), tensor.options().device(c10::kCPU));
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& to, bool non_blocking) {
  on_host(to).copy_(on_host(self));
  if (self.is_cpu() || to.is_cpu()) {
    const auto& host = self.is_cpu() ? self : to;
    const int64_t kind = settings[KIND];
    if (self.is_cpu()) {
      launch(settings[TO_DEVICE_NS], kind == COMPUTE ? TRANSFER : kind);
    } else {
      launch(settings[FROM_DEVICE_NS], kind);
    }
    if (!non_blocking || !is_pinned_pointer(host.storage().data())) finish();
  } else {
    launch(settings[OP_NS], settings[KIND]);
  }
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& to) {
  if (to.sizes() != self.sizes()) to.resize_(self.sizes());
  return copy_from(self, to, false);
}

at::Scalar local_scalar_dense(const at::Tensor& self) {
  launch(settings[FROM_DEVICE_NS], settings[KIND]);
  finish();
  return on_host(self).item();
}

at::Tensor empty(c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  const c10::DeviceGuard on(device.value_or(Device(KEY)));
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), &device_allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<Device> device, std::optional<bool>) {
  const c10::DeviceGuard on(device.value_or(Device(KEY)));
  return at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), &device_allocator,
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype));
}

const at::Tensor& resize_(const at::Tensor& self, c10::SymIntArrayRef size, std::optional<at::MemoryFormat> format) {
  return at::native::resize_(self, C10_AS_INTARRAYREF_SLOW(size), format);
}

at::Tensor& set_storage_(at::Tensor& self, at::Storage source, c10::SymInt offset, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::cpu::set__symint(self, std::move(source), std::move(offset), size, stride);
}

at::Tensor as_strided(const at::Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<c10::SymInt> offset) {
  std::optional<int64_t> from;
  if (offset) from = offset->expect_int();
  return at::native::as_strided_tensorimpl(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), from);
}

at::Tensor view(const at::Tensor& self, c10::SymIntArrayRef size) {
  return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size));
}

at::Tensor reshape_alias(const at::Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::native::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}

void record_stream(at::Tensor&, Stream) {}

struct Quiet {
  Quiet() { ++quiet; }
  ~Quiet() { --quiet; }
};

// Convolutions have no CPU fallback of their own: torch sends them to these two.
at::Tensor convolution(const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias, c10::IntArrayRef stride,
                       c10::IntArrayRef padding, c10::IntArrayRef dilation, bool transposed, c10::IntArrayRef output_padding, int64_t groups) {
  launch(settings[OP_NS], settings[KIND]);
  const Quiet no_time;
  const auto host_bias = bias && bias->defined() ? std::optional(on_host(*bias)) : std::nullopt;
  return at::convolution(on_host(input), on_host(weight), host_bias, stride, padding, dilation, transposed, output_padding, groups)
      .to(input.device());
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> convolution_backward(
    const at::Tensor& grad, const at::Tensor& input, const at::Tensor& weight, c10::IntArrayRef stride, c10::IntArrayRef padding,
    c10::IntArrayRef dilation, bool transposed, c10::IntArrayRef output_padding, int64_t groups, std::array<bool, 3> wanted) {
  launch(settings[OP_NS], settings[KIND]);
  const Quiet no_time;
  auto [of_input, of_weight, of_bias] = at::convolution_backward(
      on_host(grad), on_host(input), on_host(weight), at::OptionalIntArrayRef(weight.size(transposed ? 1 : 0) * (transposed ? groups : 1)),
      stride, padding, dilation, transposed, output_padding, groups, wanted);
  const auto back = [&](const at::Tensor& each) { return each.defined() ? each.to(input.device()) : each; };
  return {back(of_input), back(of_weight), back(of_bias)};
}

// Every other operation: it takes OP_NS on the stream, and its result is computed at once by the CPU's kernel.
void any_operation(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  static const std::unordered_set<std::string> read_back = {
      "aten::equal", "aten::nonzero", "aten::masked_select", "aten::_unique", "aten::_unique2", "aten::unique_dim",
      "aten::unique_consecutive", "aten::repeat_interleave"};  // what the host has to know the sizes of
  launch(settings[OP_NS], settings[KIND]);
  {
    const Quiet no_time;
    at::native::cpu_fallback(op, stack);
  }
  if (read_back.count(op.operator_name().name)) finish();
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("as_strided", &as_strided);
  m.impl("view", &view);
  m.impl("_reshape_alias", &reshape_alias);
  m.impl("unfold", &at::native::unfold);
  m.impl("resize_", &resize_);
  m.impl("set_.source_Tensor", &at::native::set_tensor_);
  m.impl("set_.source_Storage", &at::native::set_);
  m.impl("set_.source_Storage_storage_offset", &set_storage_);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &local_scalar_dense);
  m.impl("record_stream", &record_stream);
  m.impl("convolution_overrideable", &convolution);
  m.impl("convolution_backward_overrideable", &convolution_backward);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&any_operation>());
}

// Autocast leaves types as they are: it costs nothing here, and gains nothing.
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFallthrough());
}

}  // namespace

extern "C" {

void asyncdev_register() {
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  c10::SetAllocator(KEY, &device_allocator);
}

// Returns 0, or -1 where an injected error is due: ctypes cannot pass an exception.
int asyncdev_launch(int64_t duration_ns, int64_t kind) {
  try {
    launch(duration_ns, kind);
    return 0;
  } catch (const std::exception&) {
    return -1;
  }
}

void asyncdev_set(int setting, int64_t value) { settings[setting] = value; }
int64_t asyncdev_get(int setting) { return settings[setting]; }
int asyncdev_is_initialized() { return initialized; }

// The `nth` next call of this kind raises, and `times` calls in all from there on (-1: every one, 0: none).
void asyncdev_fail(int call, int64_t nth, int64_t times) {
  std::lock_guard<std::mutex> held(lock);
  calls[call].until_fault = nth;
  calls[call].faults = times;
}

int64_t asyncdev_calls(int call) {
  std::lock_guard<std::mutex> held(lock);
  return calls[call].made;
}

// Fills `spans` (begin, end, kind) of a stream, or of all streams of the device for -1, and returns how many there are.
int64_t asyncdev_spans(int device, int64_t stream, int64_t* spans, int64_t capacity) {
  std::lock_guard<std::mutex> held(lock);
  int64_t count = 0;
  for (const auto& [key, queue] : queues) {
    if (key.first != device || (stream >= 0 && key.second != stream)) continue;
    for (const auto& span : queue.spans) {
      if (count < capacity) std::memcpy(spans + 3 * count, &span, sizeof span);
      ++count;
    }
  }
  return count;
}

// Forgets what was done and counted; what is queued stays queued.
void asyncdev_reset() {
  std::lock_guard<std::mutex> held(lock);
  for (auto& [key, queue] : queues) queue.spans.clear();
  calls = {};
}
}
