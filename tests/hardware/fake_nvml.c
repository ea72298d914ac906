/* A driver's library NVML with two GPUs, for machines without one. tests/hardware/test_nvml.py compiles it. */
#include <string.h>
#include <stdlib.h>

static char gpus[2];

static int number_of(void *gpu) { return (char *)gpu - gpus; }
static int copy(char *to, unsigned size, const char *text) { strncpy(to, text, size); return 0; }

int nvmlInitWithFlags(unsigned flags) { return getenv("FAKE_NVML_INIT") ? atoi(getenv("FAKE_NVML_INIT")) : 0; }
int nvmlShutdown(void) { return 0; }
const char *nvmlErrorString(int code) { return code == 18 ? "RM has detected an NVML/RM version mismatch." : "?"; }
int nvmlSystemGetDriverVersion(char *to, unsigned size) { return copy(to, size, "550.54.15"); }
int nvmlSystemGetCudaDriverVersion_v2(int *version) { *version = 12040; return 0; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = 2; return 0; }

int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **gpu) {
    if (index > 1) return 2;
    *gpu = gpus + index;
    return 0;
}

int nvmlDeviceGetHandleByUUID(const char *uuid, void **gpu) {
    return strncmp(uuid, "GPU-", 4) ? 2 : nvmlDeviceGetHandleByIndex_v2(atoi(uuid + 4), gpu);
}

int nvmlDeviceGetName(void *gpu, char *to, unsigned size) {
    return copy(to, size, number_of(gpu) ? "NVIDIA H100 80GB HBM3" : "NVIDIA A10");
}

int nvmlDeviceGetUUID(void *gpu, char *to, unsigned size) { return copy(to, size, number_of(gpu) ? "GPU-1" : "GPU-0"); }

int nvmlDeviceGetCudaComputeCapability(void *gpu, int *major, int *minor) {
    *major = number_of(gpu) ? 9 : 8;
    *minor = number_of(gpu) ? 0 : 6;
    return 0;
}

int nvmlDeviceGetMemoryInfo(void *gpu, unsigned long long *memory) { /* total, free, used */
    memory[0] = number_of(gpu) ? 80ull << 30 : 24ull << 30;
    memory[1] = memory[0] - (1ull << 30);
    memory[2] = 1ull << 30;
    return 0;
}

int nvmlDeviceGetUtilizationRates(void *gpu, unsigned *percent) { /* of the GPU, of its memory */
    if (number_of(gpu) == 0) return 3; /* Not Supported */
    percent[0] = 87;
    percent[1] = 20;
    return 0;
}
