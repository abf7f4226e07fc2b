// Scans and radix sorts of CCCL for benchmarks/classic.py; each call runs on the legacy default stream.
//
// With scratch == nullptr a call only writes the bytes of scratch memory that it needs.
#include <cstdint>

#include <cub/device/device_radix_sort.cuh>
#include <cub/device/device_scan.cuh>
#include <cub/version.cuh>

extern "C" int cccl_version() { return CCCL_VERSION; }

#define SCAN(name, type)                                                                                     \
    extern "C" int scan_##name(void* scratch, size_t* bytes, const type* in, type* out, int64_t n) {         \
        return cub::DeviceScan::InclusiveSum(scratch, *bytes, in, out, n);                                   \
    }
#define SORT(name, type)                                                                                     \
    extern "C" int sort_##name(void* scratch, size_t* bytes, const type* in, type* out, int64_t n) {         \
        return cub::DeviceRadixSort::SortKeys(scratch, *bytes, in, out, n);                                  \
    }
SCAN(float32, float)
SCAN(uint32, uint32_t)
SCAN(uint64, uint64_t)
SORT(float32, float)
SORT(uint32, uint32_t)
SORT(uint64, uint64_t)

extern "C" int sort_pairs(void* scratch, size_t* bytes, const uint32_t* in, uint32_t* out, const uint32_t* values,
                          uint32_t* moved, int64_t n) {
    return cub::DeviceRadixSort::SortPairs(scratch, *bytes, in, out, values, moved, n);
}
