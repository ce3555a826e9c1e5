// Counts what torch's CPU allocator gives and takes back, in every thread, exactly: it stands in front of the default one.
// Loaded by c10_memory.py before the first tensor is made.

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>

#include <cstdint>
#include <mutex>
#include <unordered_map>

namespace {

std::mutex guard;
std::unordered_map<void*, size_t> sizes;
int64_t current = 0;
int64_t peak = 0;
c10::Allocator* inner = nullptr;

void release(void* data) {
  if (data == nullptr) return;
  {
    const std::lock_guard<std::mutex> lock(guard);
    const auto found = sizes.find(data);
    if (found != sizes.end()) {
      current -= static_cast<int64_t>(found->second);
      sizes.erase(found);
    }
  }
  inner->raw_deleter()(data);
}

class CountingAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    void* data = inner->raw_allocate(bytes);
    if (data != nullptr) {
      const std::lock_guard<std::mutex> lock(guard);
      sizes[data] = bytes;
      current += static_cast<int64_t>(bytes);
      if (current > peak) peak = current;
    }
    return {data, data, &release, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
};

}  // namespace

extern "C" {

void install() {
  if (inner != nullptr) return;
  inner = c10::GetCPUAllocator();
  c10::SetCPUAllocator(new CountingAllocator, 255);
}
int64_t current_bytes() { const std::lock_guard<std::mutex> lock(guard); return current; }
int64_t peak_bytes() { const std::lock_guard<std::mutex> lock(guard); return peak; }
void reset_peak() { const std::lock_guard<std::mutex> lock(guard); peak = current; }
}
