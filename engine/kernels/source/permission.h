// AMX's tiles need the system's permission, once for a process: their state makes each of its threads 8 KiB larger.
#pragma once

#if defined(__x86_64__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>

namespace {

// 0, or the reason that the system gives, as an errno. Linux gives it from version 5.16 on, unless some thread has an
// alternate stack for signals that is too small.
inline int ask_for_tiles() {
    constexpr long ARCH_REQ_XCOMP_PERM = 0x1023, XTILEDATA = 18;
    return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XTILEDATA) == 0 ? 0 : errno;
}

}  // namespace

#endif
