// A pretended accelerator: torch's PrivateUse1 device with storage of its own in host memory.
//
// The CPU's kernels compute on the same bytes, strides and alignment, so that results have the
// CPU's bits. As on an accelerator, an operation refuses tensors of the CPU, except numbers; fresh
// memory holds NaN; and an allocation beyond the device's memory is an OutOfMemoryError.
#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_local_scalar_dense.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>
#include <unistd.h>

using namespace at;
using c10::intrusive_ptr;
using c10d::Work;
constexpr auto DEVICE = DeviceType::PrivateUse1;
constexpr size_t ALIGNMENT = 64;  // as the CPU's: kernels of BLAS may depend on it

// -- memory ---------------------------------------------------------------------------------------

struct Counters {
  std::atomic<int64_t> current, peak;
};
static Counters of_process, *counters = &of_process;
static int64_t total_bytes, limit_bytes;
static DeviceIndex num_devices;
static thread_local DeviceIndex current_device;

struct Block {
  void* data;
  size_t size;
  bool is_mapped, is_counted;
};

static void release(void* context) {
  std::unique_ptr<Block> block(static_cast<Block*>(context));
  if (block->is_counted) counters->current -= block->size;
  if (block->is_mapped) munmap(block->data, block->size);
  else free(block->data);
}

static DataPtr owned(void* data, size_t size, bool is_mapped, bool is_counted) {
  if (is_counted) {
    const int64_t now = counters->current += size;
    if (now > counters->peak) counters->peak = now;
  }
  return {data, new Block{data, size, is_mapped, is_counted}, &release, Device(DEVICE, current_device)};
}

struct Memory final : c10::DeviceAllocator {
  DataPtr allocate(size_t size) override {
    if (size == 0) return {nullptr, Device(DEVICE, current_device)};
    TORCH_CHECK_WITH(OutOfMemoryError, counters->current + (int64_t)size <= limit_bytes,
      "pretended NPU: out of memory: ", size, " bytes asked, ", counters->current, " of ", limit_bytes, " in use");
    void* data = nullptr;
    TORCH_CHECK(posix_memalign(&data, ALIGNMENT, size) == 0);
    memset(data, 0xFF, size);
    return owned(data, size, false, true);
  }
  void copy_data(void* to, const void* from, size_t size) const override { memcpy(to, from, size); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const DataPtr&, Stream) override {}
  void resetAccumulatedStats(DeviceIndex) override {}
  void resetPeakStats(DeviceIndex) override { counters->peak = counters->current.load(); }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex) override {
    c10::CachingDeviceAllocator::DeviceStats stats;
    for (auto* bytes : {&stats.allocated_bytes, &stats.reserved_bytes}) {
      (*bytes)[0].current = counters->current;
      (*bytes)[0].peak = counters->peak;
    }
    return stats;
  }
  std::pair<size_t, size_t> getMemoryInfo(DeviceIndex) override {
    return {total_bytes - counters->current, total_bytes};
  }
};
static Memory memory;
REGISTER_ALLOCATOR(DEVICE, &memory);

// Memory of the host from which an accelerator could copy by itself. FSDP asks whether memory is.
struct PinnedMemory final : Allocator {
  std::mutex mutex;
  std::set<const void*> pinned;
  DataPtr allocate(size_t size) override;
  void copy_data(void* to, const void* from, size_t size) const override { memcpy(to, from, size); }
};
static PinnedMemory pinned_memory;
DataPtr PinnedMemory::allocate(size_t size) {
  void* data = nullptr;
  TORCH_CHECK(posix_memalign(&data, ALIGNMENT, size) == 0);
  std::lock_guard guard(mutex);
  pinned.insert(data);
  return {data, data, [](void* data) {
    std::lock_guard guard(pinned_memory.mutex);
    pinned_memory.pinned.erase(data);
    free(data);
  }, kCPU};
}

static void* mapped(int fd, size_t size) {
  void* data = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  TORCH_CHECK(data != MAP_FAILED, "mmap: ", strerror(errno));
  return data;
}

// Move the memory of a storage to where other processes can open it: /proc/PID/fd/N.
static int share(const Tensor& tensor) {
  auto storage = tensor.storage();
  const size_t size = storage.nbytes();
  const int fd = memfd_create("pretended-npu", MFD_CLOEXEC);
  TORCH_CHECK(fd >= 0 && ftruncate(fd, size) == 0, strerror(errno));
  auto data = owned(mapped(fd, size), size, true, true);
  memcpy(data.get(), storage.data(), size);
  storage.set_data_ptr(std::move(data));
  return fd;
}

static Tensor open_shared(const std::string& path, size_t size) {
  const int fd = open(path.c_str(), O_RDWR | O_CLOEXEC);
  TORCH_CHECK(fd >= 0, path, ": ", strerror(errno));
  Storage storage(Storage::use_byte_size_t(), size, owned(mapped(fd, size), size, true, false));
  close(fd);
  auto tensor = at::detail::make_tensor<TensorImpl>(std::move(storage), c10::DispatchKeySet(DispatchKey::PrivateUse1), caffe2::TypeMeta::Make<uint8_t>());
  tensor.unsafeGetTensorImpl()->set_sizes_contiguous({(int64_t)size});
  return tensor;
}

// -- what torch asks of a device: everything is done at once ---------------------------------------

struct Guard final : c10::impl::DeviceGuardImplInterface {
  DeviceType type() const override { return DEVICE; }
  Device getDevice() const override { return Device(DEVICE, current_device); }
  void setDevice(Device device) const override {
    TORCH_CHECK(device.index() < num_devices, "expected a device below ", num_devices, ", got ", device);
    current_device = device.index();
  }
  void uncheckedSetDevice(Device device) const noexcept override { current_device = device.index(); }
  Device exchangeDevice(Device device) const override {
    auto before = getDevice();
    setDevice(device);
    return before;
  }
  Stream getStream(Device) const override { return Stream(Stream::DEFAULT, getDevice()); }
  Stream getDefaultStream(Device device) const override { return getStream(device); }
  Stream getNewStream(Device device, int) const override { return getStream(device); }
  Stream getStreamFromGlobalPool(Device device, bool) const override { return getStream(device); }
  Stream exchangeStream(Stream stream) const override { return stream; }
  DeviceIndex deviceCount() const noexcept override { return num_devices; }
  void record(void**, const Stream&, const DeviceIndex, const EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const DeviceIndex) const noexcept override {}
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream&) const override {}
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(const DeviceIndex) const override {}
};
namespace {
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)
}

struct Hooks final : PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return num_devices > 0; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return num_devices; }
  DeviceIndex getCurrentDevice() const override { return current_device; }
  Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
  bool isPinnedPtr(const void* data) const override {
    std::lock_guard guard(pinned_memory.mutex);
    return pinned_memory.pinned.count(data);
  }
  void resizePrivateUse1Bytes(const Storage& storage, size_t size) const override {
    auto data = memory.allocate(size);
    if (size && storage.nbytes()) memcpy(data.get(), storage.data(), std::min(size, storage.nbytes()));
    storage.set_data_ptr(std::move(data));
    storage.set_nbytes(size);
  }
};
static Hooks hooks;

// -- operations -------------------------------------------------------------------------------------

// The same memory as a tensor of the CPU, which keeps it alive.
static Tensor on_host(const Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_privateuseone()) return tensor;
  const auto& storage = tensor.storage();
  DataPtr data(storage.mutable_data(), new Storage(storage), [](void* kept) { delete static_cast<Storage*>(kept); }, kCPU);
  Storage same(Storage::use_byte_size_t(), storage.nbytes(), std::move(data), c10::GetCPUAllocator(), true);
  auto view = at::detail::make_tensor<TensorImpl>(std::move(same), c10::DispatchKeySet(DispatchKey::CPU), tensor.dtype());
  view.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  return view;
}

static Tensor on_device(const Tensor& tensor) {
  if (!tensor.defined()) return tensor;
  auto copy = at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(DEVICE));
  on_host(copy).copy_(tensor);
  return copy;
}

static std::vector<Tensor> all_on_host(const std::vector<Tensor>& tensors) {
  std::vector<Tensor> views;
  for (const auto& tensor : tensors) views.push_back(on_host(tensor));
  return views;
}

static Tensor new_empty(IntArrayRef sizes, std::optional<ScalarType> dtype, std::optional<Layout>, std::optional<Device>, std::optional<bool>, std::optional<MemoryFormat> format) {
  return at::detail::empty_generic(sizes, &memory, c10::DispatchKeySet(DispatchKey::PrivateUse1), dtype_or_default(dtype), format);
}

static Tensor new_with_strides(IntArrayRef sizes, IntArrayRef strides, std::optional<ScalarType> dtype, std::optional<Layout>, std::optional<Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(sizes, strides, &memory, c10::DispatchKeySet(DispatchKey::PrivateUse1), dtype_or_default(dtype));
}

static Tensor copy_from(const Tensor& from, const Tensor& to, bool) {
  on_host(to).copy_(on_host(from));
  return to;
}

static Tensor copy_from_and_resize(const Tensor& from, const Tensor& to) {
  to.resize_(from.sizes());
  return copy_from(from, to, false);
}

static const Tensor& resize_in_place(const Tensor& tensor, IntArrayRef sizes, std::optional<MemoryFormat>) {
  const size_t size = (c10::multiply_integers(sizes) + tensor.storage_offset()) * tensor.itemsize();
  if (tensor.storage().nbytes() < size) hooks.resizePrivateUse1Bytes(tensor.storage(), size);
  tensor.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  return tensor;
}

static Tensor& set_storage(Tensor& tensor, Storage storage, int64_t offset, IntArrayRef sizes, IntArrayRef strides) {
  auto* implementation = tensor.unsafeGetTensorImpl();
  implementation->set_storage_keep_dtype(std::move(storage));
  implementation->set_sizes_and_strides(sizes, strides, offset);
  return tensor;
}

static Scalar number(const Tensor& tensor) { return at::_local_scalar_dense(on_host(tensor)); }

// `module.to(device)` then moves parameters in place, as on other devices.
static bool same_kind(const Tensor&, const Tensor&) { return true; }

// All other operations: the CPU's kernel on the same memory.
static void compute_on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const auto& arguments = schema.arguments();
  const auto first = stack->size() - arguments.size();
  const std::vector<c10::IValue> given(stack->begin() + first, stack->end());
  std::vector<std::pair<Tensor, Tensor>> written;
  for (size_t i = 0; i < arguments.size(); i++) {
    const auto* alias = arguments[i].alias_info();
    const bool is_written = alias && alias->isWrite();
    auto moved = [&](const Tensor& tensor) {
      TORCH_CHECK(!tensor.defined() || tensor.is_privateuseone() || (tensor.is_cpu() && tensor.dim() == 0 && !is_written),
        schema.name(), ": expected all tensors on one device, got '", arguments[i].name(), "' on the CPU: ", tensor.sizes());
      auto view = on_host(tensor);
      if (is_written) written.emplace_back(tensor, view);
      return view;
    };
    auto& value = (*stack)[first + i];
    if (value.isTensor()) {
      value = moved(value.toTensor());
    } else if (value.isTensorList()) {
      std::vector<Tensor> views;
      for (const auto& tensor : value.toTensorVector()) views.push_back(moved(tensor));
      value = views;
    } else if (value.isOptionalTensorList()) {  // indices, which may be on the CPU
      c10::List<std::optional<Tensor>> views;
      for (const std::optional<Tensor> tensor : value.toOptionalTensorList())
        views.push_back(tensor ? std::optional(on_host(*tensor)) : tensor);
      value = views;
    } else if (value.isDevice()) {
      value = Device(kCPU);
    }
  }
  op.redispatchBoxed(c10::DispatchKeySet(DispatchKey::CPU), stack);
  for (auto& [tensor, view] : written) {
    if (!tensor.defined() || (view.storage().data() == tensor.storage().data() && view.sizes() == tensor.sizes())) continue;
    tensor.resize_(view.sizes());  // it was an empty output
    on_host(tensor).copy_(view);
  }
  const auto& returns = schema.returns();
  for (size_t i = 0; i < returns.size(); i++) {
    auto& value = (*stack)[stack->size() - returns.size() + i];
    if (const auto* alias = returns[i].alias_info()) {
      const auto same = std::find_if(arguments.begin(), arguments.end(), [&](const auto& argument) {
        return argument.alias_info() && *argument.alias_info() == *alias;
      });
      TORCH_CHECK(alias->isWrite() && same != arguments.end(), schema.name(), ": views need a kernel of their own");
      value = given[same - arguments.begin()];
    } else if (value.isTensor()) {
      value = on_device(value.toTensor());
    } else if (value.isTensorList()) {
      std::vector<Tensor> copies;
      for (const auto& tensor : value.toTensorVector()) copies.push_back(on_device(tensor));
      value = copies;
    }
  }
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", new_empty);
  m.impl("empty_strided", new_with_strides);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", number);
  m.impl("resize_", TORCH_FN(resize_in_place));
  m.impl("_has_compatible_shallow_copy_type", TORCH_FN(same_kind));
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("as_strided", TORCH_FN(native::as_strided_tensorimpl));
  m.impl("view", TORCH_FN(native::view));
  m.impl("_reshape_alias", TORCH_FN(native::_reshape_alias));
  m.impl("unfold", TORCH_FN(native::unfold));
  // Otherwise torch computes it from other operations, as on no device that has kernels.
  m.impl("silu_backward", torch::CppFunction::makeFromBoxedFunction<&compute_on_host>());
  // torch's own kernels look for a backend of the device.
  m.impl("convolution", torch::CppFunction::makeFromBoxedFunction<&compute_on_host>());
  m.impl("convolution_backward", torch::CppFunction::makeFromBoxedFunction<&compute_on_host>());
}
TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&compute_on_host>());
}

// -- collectives ------------------------------------------------------------------------------------

// Another backend (Gloo) on the same memory.
struct OverHost final : c10d::Backend {
  intrusive_ptr<c10d::Backend> host;
  explicit OverHost(intrusive_ptr<c10d::Backend> given) : Backend(given->getRank(), given->getSize()), host(std::move(given)) {}
  const std::string getBackendName() const override { return "hccl"; }
  static void check(const Tensor& tensor) { TORCH_CHECK(tensor.is_privateuseone(), "HCCL: expected tensors of an NPU"); }
  static std::vector<Tensor> views(const std::vector<Tensor>& tensors) {
    for (const auto& tensor : tensors) check(tensor);
    return all_on_host(tensors);
  }
  intrusive_ptr<Work> broadcast(std::vector<Tensor>& tensors, const c10d::BroadcastOptions& options) override {
    auto on = views(tensors);
    return host->broadcast(on, options);
  }
  intrusive_ptr<Work> allreduce(std::vector<Tensor>& tensors, const c10d::AllreduceOptions& options) override {
    auto on = views(tensors);
    return host->allreduce(on, options);
  }
  intrusive_ptr<Work> _allgather_base(Tensor& output, Tensor& input, const c10d::AllgatherOptions& options) override {
    auto on = views({output, input});
    return host->_allgather_base(on[0], on[1], options);
  }
  intrusive_ptr<Work> allgather_into_tensor_coalesced(std::vector<Tensor>& outputs, std::vector<Tensor>& inputs, const c10d::AllgatherOptions& options) override {
    auto to = views(outputs), from = views(inputs);
    return host->allgather_into_tensor_coalesced(to, from, options);
  }
  intrusive_ptr<Work> _reduce_scatter_base(Tensor& output, Tensor& input, const c10d::ReduceScatterOptions& options) override {
    auto on = views({output, input});
    return host->_reduce_scatter_base(on[0], on[1], options);
  }
};

PYBIND11_MODULE(pretended_device, m) {
  m.def("initialize", [](int count, int64_t bytes, const std::string& counters_file) {
    num_devices = (DeviceIndex)count;
    total_bytes = limit_bytes = bytes;
    if (!counters_file.empty()) {
      const int fd = open(counters_file.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644);
      TORCH_CHECK(fd >= 0 && ftruncate(fd, sizeof(Counters)) == 0, counters_file, ": ", strerror(errno));
      counters = static_cast<Counters*>(mapped(fd, sizeof(Counters)));
      close(fd);
    }
    RegisterPrivateUse1HooksInterface(&hooks);
  });
  m.def("limit", [](int64_t bytes) { limit_bytes = bytes; });
  m.def("share", &share);
  m.def("open_shared", &open_shared);
  m.def("over_host", [](intrusive_ptr<c10d::Backend> host) -> intrusive_ptr<c10d::Backend> {
    return c10::make_intrusive<OverHost>(std::move(host));
  });
}
