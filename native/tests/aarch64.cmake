# The kernels for ARM on another processor: cross-compiled, and run in user-mode emulation
# (Debian's g++-aarch64-linux-gnu and qemu-user-static).
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_CXX_COMPILER aarch64-linux-gnu-g++)
find_program(CLEARHEAD_QEMU NAMES qemu-aarch64-static qemu-aarch64 REQUIRED)
set(CMAKE_CROSSCOMPILING_EMULATOR ${CLEARHEAD_QEMU} -L /usr/aarch64-linux-gnu)
