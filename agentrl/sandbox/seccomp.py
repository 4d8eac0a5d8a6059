"""The system calls that a sandboxed program may not make: a filter of the kernel (seccomp), which bubblewrap loads.

A namespace hides files, processes and networks. What is below is in no namespace, or is a way around one: the keys that
the kernel keeps for a user, the memory of other processes, programs inside the kernel, mounts, sockets to the machine
that hosts this one. No agent needs any of it.
"""

import os
import platform
import struct

AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}

DENIED: dict[str, tuple[int | None, int | None]] = {
    # keys of the user and the session who run agentrl; runs could talk to each other through them
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    # other processes, so bubblewrap's own too
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "process_madvise": (440, 440),
    "kcmp": (312, 272),
    "pidfd_getfd": (438, 438),
    # programs inside the kernel, and what makes calls that no filter sees
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    # namespaces and mounts
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    # the machine
    "syslog": (103, 116),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "reboot": (169, 142),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "acct": (163, 89),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
    "iopl": (172, None),
    "ioperm": (173, None),
    "modify_ldt": (154, None),
}
"""Name -> number on x86_64 and on aarch64, None if there is no such call. They fail with EPERM."""

CLONE, CLONE3 = (56, 220), (435, 435)
SOCKET, SOCKETPAIR = (41, 198), (53, 199)
NEWEST = 462
"""The last number that was looked at (mseal, of Linux 6.10). Later ones, and those of the x32 form of x86_64, fail with
ENOSYS, as on an older kernel."""
NAMESPACES = 0x7E020000
"""The flags of clone that make namespaces. clone3 keeps its flags in memory, where no filter can read them: it fails
with ENOSYS, and libraries take clone instead."""
FAMILIES = (1, 2, 10, 16)
"""Sockets: of files, IPv4, IPv6, and netlink, by which a program lists its interfaces. Others, such as those between
a virtual machine and its host (AF_VSOCK), are in no namespace of networks. They fail with EAFNOSUPPORT."""

_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_EPERM, _ENOSYS, _EAFNOSUPPORT = 1, 38, 97  # the same on both architectures
_LOAD, _EQUAL, _GREATER, _ANY_BIT, _RETURN = 0x20, 0x15, 0x25, 0x45, 0x06
_NUMBER_AT, _ARCH_AT, _FIRST_ARGUMENT_AT = 0, 4, 16  # in struct seccomp_data; the low half of the argument


def program(machine: str | None = None) -> bytes:
    """The filter as classic BPF, in the form that ``bwrap --seccomp`` reads, for ``platform.machine()`` or another.
    Raises ValueError for an architecture whose numbers are not known. A call in the form of another architecture (32
    bits on x86_64) ends the program."""
    machine = machine or platform.machine()
    if machine not in AUDIT_ARCH:
        raise ValueError(f"the filter of system calls knows {' and '.join(AUDIT_ARCH)}, not {machine!r}")
    column = list(AUDIT_ARCH).index(machine)
    lines = [_line(_LOAD, _ARCH_AT), _line(_EQUAL, AUDIT_ARCH[machine], 1, 0), _line(_RETURN, _KILL)]
    lines += [_line(_LOAD, _NUMBER_AT), _line(_GREATER, NEWEST, 0, 1), _line(_RETURN, _ERRNO | _ENOSYS)]
    lines += [_line(_EQUAL, CLONE3[column], 0, 1), _line(_RETURN, _ERRNO | _ENOSYS)]
    for numbers in DENIED.values():
        number = numbers[column]
        if number is not None:
            lines += [_line(_EQUAL, number, 0, 1), _line(_RETURN, _ERRNO | _EPERM)]
    lines += [_line(_EQUAL, CLONE[column], 0, 4), _line(_LOAD, _FIRST_ARGUMENT_AT)]
    lines += [_line(_ANY_BIT, NAMESPACES, 0, 1), _line(_RETURN, _ERRNO | _EPERM), _line(_RETURN, _ALLOW)]
    lines += [_line(_EQUAL, SOCKET[column], 1, 0), _line(_EQUAL, SOCKETPAIR[column], 0, len(FAMILIES) + 2)]
    lines += [_line(_LOAD, _FIRST_ARGUMENT_AT)]
    lines += [_line(_EQUAL, family, len(FAMILIES) - index, 0) for index, family in enumerate(FAMILIES)]
    lines += [_line(_RETURN, _ERRNO | _EAFNOSUPPORT), _line(_RETURN, _ALLOW)]
    return b"".join(lines)


def readable() -> int:
    """A file descriptor from which the filter can be read once. Its user closes it."""
    reading, writing = os.pipe()
    with os.fdopen(writing, "wb") as pipe:
        pipe.write(program())  # a kilobyte, far less than a pipe holds
    return reading


def _line(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    """One instruction: struct sock_filter. A jump counts the instructions that it leaves out."""
    return struct.pack("=HBBI", code, if_true, if_false, value)
