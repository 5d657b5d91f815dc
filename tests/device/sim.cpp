// A simulated accelerator for tests: torch device "sim" (PrivateUse1). Its memory cannot be read by the host
// (dereferencing data_ptr() is a SIGSEGV), streams are real threads, copies to pinned memory are asynchronous and take
// the time that a link of a given bandwidth takes, kernels run on the CPU, in place, in the order of their stream.
// Written for this project against torch's public headers (torch.utils.rename_privateuse1_backend names the steps).
#include <ATen/core/Tensor.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/empty_strided.h>
#include <torch/library.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
namespace py = pybind11;
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/TensorFactories.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/view_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/set_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <sys/mman.h>
#include <unistd.h>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <unordered_map>
#include <vector>

namespace sim {
constexpr auto KEY = c10::DeviceType::PrivateUse1;
using Clock = std::chrono::steady_clock;

// ---------------------------------------------------------------- statistics and knobs
std::atomic<double> gbps{0};  // 0: as fast as memcpy
std::atomic<int64_t> d2h_blocking{0}, d2h_async{0}, d2h_bytes{0}, h2d_bytes{0}, kernels{0}, stream_syncs{0};

// ---------------------------------------------------------------- device memory: unreadable for the host
constexpr size_t SPACE = size_t(1) << 36;
char *dev = nullptr, *alias = nullptr;
std::mutex heap;
size_t top = 0, in_use = 0, peak = 0;
std::map<size_t, std::vector<size_t>> freed;
std::unordered_map<size_t, size_t> sizes;

void open_memory() {
  static std::once_flag once;
  std::call_once(once, [] {
    int fd = memfd_create("sim", 0);
    TORCH_CHECK(fd >= 0 && ftruncate(fd, SPACE) == 0, "no memfd");
    alias = (char*)mmap(nullptr, SPACE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
    dev = (char*)mmap(nullptr, SPACE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    TORCH_CHECK(alias != MAP_FAILED && dev != MAP_FAILED, "no address space");
    close(fd);
  });
}
bool ours(const void* p) { return dev && (char*)p >= dev && (char*)p < dev + SPACE; }
char* host(const void* p) { return alias + ((char*)p - dev); }

struct Memory final : c10::Allocator {
  c10::DataPtr allocate(size_t n) override {
    c10::Device where(KEY, 0);
    if (n == 0) return {nullptr, nullptr, &drop, where};
    open_memory();
    std::lock_guard<std::mutex> lock(heap);
    size_t size = (n + 4095) / 4096 * 4096, at;
    auto it = freed.find(size);
    if (it != freed.end() && !it->second.empty()) { at = it->second.back(); it->second.pop_back(); }
    else { at = top; top += size; TORCH_CHECK(top <= SPACE, "sim: out of memory"); }
    sizes[at] = size;
    in_use += size;
    peak = std::max(peak, in_use);
    return {dev + at, dev + at, &drop, where};
  }
  static void drop(void* p) {
    if (!p) return;
    std::lock_guard<std::mutex> lock(heap);
    size_t at = (char*)p - dev, size = sizes[at];
    in_use -= size;
    freed[size].push_back(at);  // the next taker writes over it at once, as a caching allocator's does
  }
  c10::DeleterFnPtr raw_deleter() const override { return &drop; }
  void copy_data(void* to, const void* from, std::size_t n) const override { std::memcpy(host(to), host(from), n); }
};
Memory memory;
REGISTER_ALLOCATOR(KEY, &memory);

// ---------------------------------------------------------------- pinned host memory
std::mutex pins;
std::map<char*, size_t> pinned_ranges;
struct Pinned final : c10::Allocator {
  c10::DataPtr allocate(size_t n) override {
    if (n == 0) return {nullptr, nullptr, &drop, c10::DeviceType::CPU};
    void* p = nullptr;
    TORCH_CHECK(posix_memalign(&p, 4096, n) == 0, "no memory");
    std::lock_guard<std::mutex> lock(pins);
    pinned_ranges[(char*)p] = n;
    return {p, p, &drop, c10::DeviceType::CPU};
  }
  static void drop(void* p) {
    if (!p) return;
    { std::lock_guard<std::mutex> lock(pins); pinned_ranges.erase((char*)p); }
    free(p);
  }
  c10::DeleterFnPtr raw_deleter() const override { return &drop; }
  void copy_data(void* to, const void* from, std::size_t n) const override { std::memcpy(to, from, n); }
};
Pinned pinned;
bool is_pinned(const void* p) {
  std::lock_guard<std::mutex> lock(pins);
  auto it = pinned_ranges.upper_bound((char*)p);
  if (it == pinned_ranges.begin()) return false;
  --it;
  return (char*)p < it->first + it->second;
}

// ---------------------------------------------------------------- streams: a thread and a queue each
struct Stream {
  std::mutex m;
  std::condition_variable cv;
  std::deque<std::function<void()>> tasks;
  int64_t given = 0, done = 0;
  Stream() { std::thread([this] { work(); }).detach(); }
  void work() {
    for (;;) {
      std::function<void()> task;
      { std::unique_lock<std::mutex> lock(m); cv.wait(lock, [this] { return !tasks.empty(); });
        task = std::move(tasks.front()); tasks.pop_front(); }
      task();
      task = nullptr;
      { std::lock_guard<std::mutex> lock(m); ++done; }
      cv.notify_all();
    }
  }
  void put(std::function<void()> task) {
    { std::lock_guard<std::mutex> lock(m); tasks.push_back(std::move(task)); ++given; }
    cv.notify_all();
  }
  bool idle() { std::lock_guard<std::mutex> lock(m); return done == given; }
  void wait() {
    std::unique_lock<std::mutex> lock(m);
    auto mine = given;
    cv.wait(lock, [&] { return done >= mine; });
  }
};
std::mutex many;
std::vector<Stream*>& streams() { static auto* all = new std::vector<Stream*>{new Stream}; return *all; }
Stream& stream(int64_t id) { std::lock_guard<std::mutex> lock(many); return *streams().at(id); }
thread_local int64_t current = 0;
c10::Stream named(int64_t id) { return c10::Stream(c10::Stream::UNSAFE, c10::Device(KEY, 0), id); }

struct Event {
  std::mutex m;
  std::condition_variable cv;
  int64_t recorded = 0, reached = 0;
  Clock::time_point at;
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return KEY; }
  c10::Device exchangeDevice(c10::Device) const override { return {KEY, 0}; }
  c10::Device getDevice() const override { return {KEY, 0}; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device) const noexcept override { return named(current); }
  c10::Stream getDefaultStream(c10::Device) const override { return named(0); }
  c10::Stream getNewStream(c10::Device, int = 0) const override {
    std::lock_guard<std::mutex> lock(many);
    streams().push_back(new Stream);
    return named(streams().size() - 1);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device d, bool = false) const override { return getNewStream(d); }
  c10::Stream exchangeStream(c10::Stream s) const noexcept override {
    auto old = current; current = s.id(); return named(old);
  }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  bool queryStream(const c10::Stream& s) const override { return stream(s.id()).idle(); }
  void synchronizeStream(const c10::Stream& s) const override { ++stream_syncs; stream(s.id()).wait(); }
  void synchronizeDevice(const c10::DeviceIndex) const {
    std::vector<Stream*> all;
    { std::lock_guard<std::mutex> lock(many); all = streams(); }
    for (auto* s : all) s->wait();
  }
  void record(void** e, const c10::Stream& s, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (!*e) *e = new std::shared_ptr<Event>(std::make_shared<Event>());
    auto event = *(std::shared_ptr<Event>*)*e;
    int64_t number;
    { std::lock_guard<std::mutex> lock(event->m); number = ++event->recorded; }
    stream(s.id()).put([event, number] {
      { std::lock_guard<std::mutex> lock(event->m); event->reached = number; event->at = Clock::now(); }
      event->cv.notify_all();
    });
  }
  static std::function<void()> waiter(void* e) {
    auto event = *(std::shared_ptr<Event>*)e;
    int64_t number;
    { std::lock_guard<std::mutex> lock(event->m); number = event->recorded; }
    return [event, number] {
      std::unique_lock<std::mutex> lock(event->m);
      event->cv.wait(lock, [&] { return event->reached >= number; });
    };
  }
  void block(void* e, const c10::Stream& s) const override { if (e) stream(s.id()).put(waiter(e)); }
  bool queryEvent(void* e) const override {
    if (!e) return true;
    auto& event = **(std::shared_ptr<Event>*)e;
    std::lock_guard<std::mutex> lock(event.m);
    return event.reached >= event.recorded;
  }
  void synchronizeEvent(void* e) const { if (e) waiter(e)(); }
  void destroyEvent(void* e, const c10::DeviceIndex) const noexcept override { delete (std::shared_ptr<Event>*)e; }
  double elapsedTime(void* a, void* b, const c10::DeviceIndex) const {
    return std::chrono::duration<double, std::milli>(
        (**(std::shared_ptr<Event>*)b).at - (**(std::shared_ptr<Event>*)a).at).count();
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Generator final : at::CPUGeneratorImpl {
  explicit Generator(c10::DeviceIndex i) { device_ = c10::Device(KEY, i < 0 ? 0 : i); key_set_ = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1); }
};
struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const { return true; }
  bool isAvailable() const { return true; }
  void init() const override {}
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  bool isPinnedPtr(const void* p) const override { return is_pinned(p); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned; }
  at::Device getDeviceFromPtr(void*) const override { return {KEY, 0}; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex = -1) const {
    static at::Generator one = at::make_generator<Generator>(0);
    return one;
  }
  at::Generator getNewGenerator(c10::DeviceIndex i = -1) const { return at::make_generator<Generator>(i); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    auto fresh = memory.allocate(size);
    auto keep = std::min(size, storage.nbytes());
    if (keep) std::memcpy(host(fresh.get()), host(storage.data()), keep);
    storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(fresh));
    storage.unsafeGetStorageImpl()->set_nbytes(size);
  }
};

// ---------------------------------------------------------------- copies
thread_local int quiet = 0;  // inside of a kernel: copies cost nothing and count nothing

at::Tensor seen(const at::Tensor& t) {  // the same memory as a CPU tensor
  if (t.device().type() != KEY) return t;
  auto options = t.options().device(c10::kCPU);
  if (t.numel() == 0) return at::empty_strided(t.sizes(), t.strides(), options);
  return at::from_blob(host(t.data_ptr()), t.sizes(), t.strides(), options);
}
void crawl(char* to, const char* from, size_t n) {
  auto began = Clock::now();
  double rate = gbps * 1e9;
  if (rate <= 0) { std::memcpy(to, from, n); return; }
  for (size_t i = 0; i < n; i += 1 << 20) {
    auto part = std::min<size_t>(1 << 20, n - i);
    std::memcpy(to + i, from + i, part);
    std::this_thread::sleep_until(began + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>((i + part) / rate)));
  }
}
at::Tensor copy_from(const at::Tensor& self, const at::Tensor& dst, bool non_blocking) {
  auto from = seen(self), to = seen(dst);
  if (quiet || self.numel() == 0) { if (!quiet) stream(current).wait(); to.copy_(from); return dst; }
  bool out = dst.device().is_cpu(), in = self.device().is_cpu(), plain = from.dtype() == to.dtype() && from.is_contiguous() && to.is_contiguous();
  size_t n = from.nbytes();
  if (out) d2h_bytes += n;
  if (in) h2d_bytes += n;
  const void* outside = out ? dst.data_ptr() : self.data_ptr();
  if (non_blocking && plain && (out || in) && is_pinned(outside)) {
    if (out) ++d2h_async;
    auto keep = out ? dst.storage() : self.storage();  // pinned memory outlives the copy; device memory need not
    char *a = (char*)to.data_ptr(), *b = (char*)from.data_ptr();
    stream(current).put([=] { (void)keep; crawl(a, b, n); });
    return dst;
  }
  if (out) ++d2h_blocking;
  py::gil_scoped_release* free_gil = PyGILState_Check() ? new py::gil_scoped_release : nullptr;
  stream(current).wait();
  if (plain && (out || in)) crawl((char*)to.data_ptr(), (char*)from.data_ptr(), n);
  else {
    auto began = Clock::now();
    to.copy_(from);
    if (gbps > 0 && (out || in)) std::this_thread::sleep_until(began + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(n / (gbps * 1e9))));
  }
  delete free_gil;
  return dst;
}
const at::Tensor& resize(const at::Tensor& self, at::IntArrayRef size, std::optional<at::MemoryFormat>) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(size);
  size_t need = (self.numel() + self.storage_offset()) * self.element_size();
  if (need > self.storage().nbytes()) at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(self.storage(), need);
  return self;
}
at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& dst) {
  if (dst.sizes() != self.sizes()) dst.resize_(self.sizes());
  return copy_from(self, dst, false);
}
at::Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(size, &memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype), format);
}
at::Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(size, stride, &memory, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype));
}
at::Tensor& set_storage(at::Tensor& self, at::Storage source, int64_t offset, at::IntArrayRef size, at::IntArrayRef stride) {
  return at::native::set_storage_cpu_(self, source, offset, size, stride);
}
at::Tensor& set_whole(at::Tensor& self, at::Storage source) {
  int64_t n = source.nbytes() / self.element_size();
  return at::native::set_storage_cpu_(self, source, 0, {n}, {1});
}
at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return at::native::set_storage_cpu_(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}
void kernel(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  ++kernels;
  if (!quiet) stream(current).wait();  // in its stream's order
  ++quiet;
  try { at::native::cpu_fallback(op, stack); } catch (...) { --quiet; throw; }
  --quiet;
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("as_strided", [](const at::Tensor& t, at::IntArrayRef a, at::IntArrayRef b, std::optional<int64_t> o) { return at::native::as_strided_tensorimpl(t, a, b, o); });
  m.impl("view", [](const at::Tensor& t, at::IntArrayRef s) { return at::native::view(t, s); });
  m.impl("_reshape_alias", [](const at::Tensor& t, at::IntArrayRef a, at::IntArrayRef b) { return at::native::_reshape_alias(t, a, b); });
  m.impl("resize_", &resize);
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  m.impl("set_.source_Storage", &set_whole);
  m.impl("set_.source_Tensor", &set_tensor);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
}
TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&kernel>()); }
}  // namespace sim

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  at::RegisterPrivateUse1HooksInterface(new sim::Hooks);
  m.def("bandwidth", [](double v) { sim::gbps = v; });
  m.def("reset", [] { for (auto* c : {&sim::d2h_blocking, &sim::d2h_async, &sim::d2h_bytes, &sim::h2d_bytes, &sim::kernels, &sim::stream_syncs}) *c = 0; sim::peak = sim::in_use; });
  m.def("stats", [] { return std::map<std::string, int64_t>{{"d2h_blocking", sim::d2h_blocking}, {"d2h_async", sim::d2h_async}, {"d2h_bytes", sim::d2h_bytes}, {"h2d_bytes", sim::h2d_bytes}, {"kernels", sim::kernels}, {"stream_syncs", sim::stream_syncs}, {"in_use", (int64_t)sim::in_use}, {"peak", (int64_t)sim::peak}}; });
  m.def("synchronize", [] { py::gil_scoped_release no; sim::Guard().synchronizeDevice(0); });
}
