//! The interpreter of restore programs: about sixty instructions without a stack, data of their own
//! or a fixed address.
//!
//! The code runs in a process whose memory is being replaced meanwhile. `rbx` points to the
//! operation ([`super::program::OPERATION_BYTES`] each), and everything else is loaded from there.
//! A process created by an operation that forks, or a thread without a stack, starts with the same
//! registers and continues at the operation that the fork names.
//!
//! The labels are global, since references to them may be compiled into another object, and hidden,
//! so that they are not exported.
//!
//! The code stops, by a breakpoint, at the end of a stage and at a call that failed. The tracer
//! reads the operation from `rbx`, and the result from `rax`.

use std::arch::global_asm;

global_asm!(
    ".pushsection .rodata.dormouse_interpreter, \"a\"",
    ".balign 16",
    ".globl dormouse_interpreter_start",
    ".hidden dormouse_interpreter_start",
    "dormouse_interpreter_start:",
    // Next operation.
    "2:",
    "mov eax, dword ptr [rbx]",
    "mov r12d, dword ptr [rbx + 4]",
    "mov rdi, qword ptr [rbx + 8]",
    "mov rsi, qword ptr [rbx + 16]",
    "mov rdx, qword ptr [rbx + 24]",
    "mov r10, qword ptr [rbx + 32]",
    "mov r8, qword ptr [rbx + 40]",
    "mov r9, qword ptr [rbx + 48]",
    // Arguments that are in cells: bits 0 to 4 of the flags. The first may have 64 bits.
    "test r12d, 1",
    "jz 3f",
    "movsxd rdi, dword ptr [rdi]",
    "3: test r12d, 0x2000",
    "jz 3f",
    "mov rdi, qword ptr [rdi]",
    "3: test r12d, 2",
    "jz 3f",
    "movsxd rsi, dword ptr [rsi]",
    "3: test r12d, 4",
    "jz 3f",
    "movsxd rdx, dword ptr [rdx]",
    "3: test r12d, 8",
    "jz 3f",
    "movsxd r10, dword ptr [r10]",
    "3: test r12d, 16",
    "jz 3f",
    "movsxd r8, dword ptr [r8]",
    // The end of a stage.
    "3: test r12d, 0x100",
    "jz 3f",
    "int3",
    "jmp 5f",
    "3: syscall",
    // In a child, which begins with its own operation.
    "test r12d, 0x200",
    "jz 3f",
    "test rax, rax",
    "jnz 3f",
    "mov rbx, qword ptr [rbx + 56]",
    "jmp 2b",
    // A failure, unless it is allowed.
    "3: cmp rax, -4095",
    "jb 4f",
    "test r12d, 0x400",
    "jnz 5f",
    "int3",
    "ud2",
    // A call that must return its sixth argument.
    "4: test r12d, 0x800",
    "jz 4f",
    "cmp rax, r9",
    "je 4f",
    "int3",
    "ud2",
    // A result that goes into a cell.
    "4: test r12d, 0x1000",
    "jz 5f",
    "mov rcx, qword ptr [rbx + 56]",
    "mov dword ptr [rcx], eax",
    "5: add rbx, 64",
    "jmp 2b",
    ".globl dormouse_interpreter_end",
    ".hidden dormouse_interpreter_end",
    "dormouse_interpreter_end:",
    ".popsection",
);

// Code that runs when its tracer has ended changes no flags, and uses no stack: both are the interrupted program's.
// Instead of comparisons it has jrcxz and lea.

global_asm!(
    ".pushsection .rodata.dormouse_follower, \"a\"",
    ".balign 16",
    ".globl dormouse_follower_start",
    ".hidden dormouse_follower_start",
    "dormouse_follower_start:",
    // From the call at rbx to the end of all, at -r13.
    "2: lea rcx, [rbx + r13]",
    "jrcxz 3f",
    "mov rax, qword ptr [rbx]",
    "mov rdi, qword ptr [rbx + 8]",
    "mov rsi, qword ptr [rbx + 16]",
    "mov rdx, qword ptr [rbx + 24]",
    "mov r10, qword ptr [rbx + 32]",
    "mov r8, qword ptr [rbx + 40]",
    "mov r9, qword ptr [rbx + 48]",
    "syscall",
    "mov qword ptr [rbx + 56], rax",
    "lea rbx, [rbx + 64]",
    "jmp 2b",
    // Waits until the tracer interrupts: ppoll(NULL, 0, TIME, NULL).
    "3: mov eax, 271",
    "mov edi, 0",
    "mov esi, 0",
    "lea rdx, [r12 + 4096]",
    "mov r10d, 0",
    "syscall",
    // EINTR: the kernel ends a wait for other reasons than signals, too (cgroup freezer). TIME has what is left of it.
    "lea rcx, [rax + 4]",
    "jrcxz 3b",
    // The tracer has ended.
    "jmp qword ptr [r12 + 4112]",
    ".globl dormouse_follower_end",
    ".hidden dormouse_follower_end",
    "dormouse_follower_end:",
    ".popsection",
);

// The landing code. The places in a slot are those of super::landing.
global_asm!(
    ".pushsection .rodata.dormouse_landing, \"a\"",
    ".balign 16",
    ".globl dormouse_landing_start",
    ".hidden dormouse_landing_start",
    "dormouse_landing_start:",
    // An injected call; r15 is the slot.
    "syscall",
    // The tracer has ended. Undoes by the call rbp, unless that is 0, of r12, or of the result if that is 0, and r14.
    "mov rcx, rbp",
    "jrcxz 4f",
    "mov rsi, r14",
    "mov rdi, r12",
    "mov rcx, r12",
    "jrcxz 2f",
    "jmp 3f",
    "2: mov rdi, rax",
    "3: mov eax, ebp",
    "syscall",
    "4: mov r11, r15",
    "jmp 3f",
    // As below, and the mask is the program's: no call is made. r11 is the slot.
    ".globl dormouse_landing_still",
    ".hidden dormouse_landing_still",
    "dormouse_landing_still:",
    ".byte 0xeb, 5f - 6f", // jmp 5f, of two bytes
    // A signal handler has run.
    "6: mov r9, r11",
    "mov r8, -4",
    "jmp 8f",
    "5: mov r9, r11",
    "mov r8, 0",
    "jmp 8f",
    // No call was injected yet, or all were made; r11 is the slot. The kernel sets the address two bytes back when it
    // begins an interrupted call again.
    ".globl dormouse_landing_parked",
    ".hidden dormouse_landing_parked",
    "dormouse_landing_parked:",
    ".byte 0xeb, 3f - 6f", // jmp 3f, of two bytes
    // A signal handler has run.
    "6: mov r9, r11",
    "mov r8, -4",
    "jmp 7f",
    "3: mov r9, r11",
    "mov rbx, qword ptr [r9 + 32]",
    "mov rbp, qword ptr [r9 + 40]",
    "mov r12, qword ptr [r9 + 48]",
    "mov r13, qword ptr [r9 + 56]",
    "mov r14, qword ptr [r9 + 64]",
    "mov r15, qword ptr [r9 + 72]",
    // ppoll(NULL, 0, ZEROS, MASK, 8): fails with EINTR if a handler runs. Or a call that fails with EINVAL.
    "mov edi, 0",
    "mov esi, 0",
    "lea rdx, [rip + 2f]",
    "lea r10, [r9 - 64]",
    "mov r8d, 8",
    "mov rax, qword ptr [r9 - 32]",
    "syscall",
    "mov r8, rax",
    // rt_sigprocmask(SIG_SETMASK, MASK, NULL, 8)
    "7: mov edi, 2",
    "lea rsi, [r9 - 64]",
    "mov edx, 0",
    "mov r10d, 8",
    "mov eax, 14",
    "syscall",
    // A dispatch of system calls: none, with a selector, or without one.
    "8: movzx ecx, byte ptr [r9 + 130]",
    "jrcxz 4f",
    "lea rcx, [rcx - 1]",
    "jrcxz 3f",
    // The byte lent to it: if it is not 0, calls are reported already, and none can be made.
    "movzx ecx, byte ptr [r9 + 129]",
    "jrcxz 5f",
    "jmp 4f",
    // prctl(PR_SET_SYSCALL_USER_DISPATCH, MODE, START, LENGTH, NULL)
    "5: mov rbx, r8",
    "mov edi, 59",
    "movzx esi, byte ptr [r9 + 131]",
    "mov rdx, qword ptr [r9 + 120]",
    "mov r10, qword ptr [r9 + 136]",
    "mov r8d, 0",
    "mov eax, 157",
    "syscall",
    "mov r8, rbx",
    "mov rbx, qword ptr [r9 + 32]",
    "jmp 4f",
    "3: mov rcx, qword ptr [r9 + 120]",
    "mov dl, byte ptr [r9 + 128]",
    "mov byte ptr [rcx], dl",
    "4: mov rdx, qword ptr [r9 + 80]",
    "mov rsi, qword ptr [r9 + 88]",
    "mov rdi, qword ptr [r9 + 96]",
    "mov r10, qword ptr [r9 + 104]",
    "mov r11, qword ptr [r9 + 112]",
    "lea rcx, [r8 + 4]",
    "jrcxz 9f",
    "mov rcx, qword ptr [r9 - 16]",
    "mov r8, qword ptr [r9 - 8]",
    "mov rax, qword ptr [r9 - 40]",
    "jmp r9",
    // EINTR.
    "9: lea rax, [rcx - 4]",
    "mov rcx, qword ptr [r9 - 16]",
    "mov r8, qword ptr [r9 - 8]",
    "lea r9, [r9 + 13]",
    "jmp r9",
    "2: .quad 0, 0",
    ".globl dormouse_landing_end",
    ".hidden dormouse_landing_end",
    "dormouse_landing_end:",
    ".popsection",
);

/// The interpreter's bytes.
pub(crate) fn interpreter() -> &'static [u8] {
    unsafe extern "C" {
        static dormouse_interpreter_start: u8;
        static dormouse_interpreter_end: u8;
    }
    between(&raw const dormouse_interpreter_start, &raw const dormouse_interpreter_end)
}

/// The bytes of the code that makes the calls of a [`super::script::Script`], one after the other.
pub(crate) fn follower() -> &'static [u8] {
    unsafe extern "C" {
        static dormouse_follower_start: u8;
        static dormouse_follower_end: u8;
    }
    between(&raw const dormouse_follower_start, &raw const dormouse_follower_end)
}

/// The bytes of the landing code ([`super::landing`]).
pub(crate) fn landing() -> &'static [u8] {
    unsafe extern "C" {
        static dormouse_landing_start: u8;
        static dormouse_landing_end: u8;
    }
    between(&raw const dormouse_landing_start, &raw const dormouse_landing_end)
}

/// Where in the landing code a task without an injected call continues whose mask is its own.
pub(crate) fn still() -> u64 {
    unsafe extern "C" {
        static dormouse_landing_start: u8;
        static dormouse_landing_still: u8;
    }
    between(&raw const dormouse_landing_start, &raw const dormouse_landing_still).len() as u64
}

/// Where in the landing code a task without an injected call continues.
pub(crate) fn parked() -> u64 {
    unsafe extern "C" {
        static dormouse_landing_start: u8;
        static dormouse_landing_parked: u8;
    }
    between(&raw const dormouse_landing_start, &raw const dormouse_landing_parked).len() as u64
}

fn between(start: *const u8, end: *const u8) -> &'static [u8] {
    // SAFETY: both are labels of one section, the second after the first, and the bytes between
    // them are never written.
    unsafe { std::slice::from_raw_parts(start, end as usize - start as usize) }
}
