// CUDA devices that hold nothing, for a torch that was built without CUDA: enough for tensors of FakeTensorMode to say
// that they are on "cuda:0", and for the autograd engine to run a thread for them. Load it before torch.

#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <atomic>
#include <optional>

namespace c10::impl {

// The devices, streams and events that torch's C++ side asks for; whatever is waited for is done already.
struct EmptyDevices : NoOpDeviceGuardImpl<DeviceType::CUDA> {
  static constexpr DeviceIndex num_devices = 8;
  static inline thread_local DeviceIndex current_device = 0; // of each thread, as in CUDA
  static inline thread_local StreamId current_stream = 0;
  static inline std::atomic<StreamId> last_stream = 0;

  static Device current() {
    return Device(DeviceType::CUDA, current_device);
  }
  Device exchangeDevice(Device device) const override {
    Device before = current();
    setDevice(device);
    return before;
  }
  Device getDevice() const override {
    return current();
  }
  void setDevice(Device device) const override {
    if (device.has_index())
      current_device = device.index();
  }
  void uncheckedSetDevice(Device device) const noexcept override {
    if (device.has_index())
      current_device = device.index();
  }
  DeviceIndex deviceCount() const noexcept override {
    return num_devices;
  }
  Stream getStream(Device device) const noexcept override {
    return Stream(Stream::UNSAFE, device, current_stream);
  }
  Stream getDefaultStream(Device device) const override {
    return Stream(Stream::UNSAFE, device, 0);
  }
  Stream getNewStream(Device device, int) const override {
    return Stream(Stream::UNSAFE, device, ++last_stream);
  }
  Stream exchangeStream(Stream stream) const noexcept override {
    Stream before = getStream(stream.device());
    current_stream = stream.id();
    return before;
  }
  void record(void** event, const Stream&, const DeviceIndex, const EventFlag) const override {
    *event = this_is_an_event();
  }
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override {
    return true;
  }
  void synchronizeEvent(void*) const override {}
  void recordDataPtrOnStream(const DataPtr&, const Stream&) const override {}

  static void* this_is_an_event() {
    static int event;
    return &event;
  }
};

C10_REGISTER_GUARD_IMPL(CUDA, EmptyDevices);

} // namespace c10::impl

// Both functions are torch's own; the loader takes the first library that has them, which is this one.
namespace at {

struct Hooks : CUDAHooksInterface {
  void init() const override {}
  bool hasCUDA() const override {
    return true;
  }
  bool hasPrimaryContext(DeviceIndex) const override {
    return true;
  }
  DeviceIndex current_device() const override {
    return c10::impl::EmptyDevices::current_device;
  }
  DeviceIndex deviceCount() const override {
    return c10::impl::EmptyDevices::num_devices;
  }
  DeviceIndex getCurrentDevice() const override {
    return c10::impl::EmptyDevices::current_device;
  }
};

namespace accelerator {
__attribute__((visibility("default"))) std::optional<c10::DeviceType> getAccelerator(bool) {
  return c10::DeviceType::CUDA;
}
} // namespace accelerator

namespace detail {
__attribute__((visibility("default"))) const CUDAHooksInterface& getCUDAHooks() {
  static Hooks hooks;
  return hooks;
}
} // namespace detail

} // namespace at

// For Python: the device of the calling thread.
extern "C" {
int fake_cuda_device() {
  return c10::impl::EmptyDevices::current_device;
}
void fake_cuda_set_device(int index) {
  c10::impl::EmptyDevices::current_device = static_cast<c10::DeviceIndex>(index);
}
int fake_cuda_num_devices() {
  return c10::impl::EmptyDevices::num_devices;
}
}
