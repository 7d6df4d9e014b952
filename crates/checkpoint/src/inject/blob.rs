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

global_asm!(
    ".pushsection .rodata.dormouse_follower, \"a\"",
    ".balign 16",
    ".globl dormouse_follower_start",
    ".hidden dormouse_follower_start",
    "dormouse_follower_start:",
    // From the call at rbx to the end of all, at r13.
    "2: cmp rbx, r13",
    "je 3f",
    "mov rax, qword ptr [rbx]",
    "mov rdi, qword ptr [rbx + 8]",
    "mov rsi, qword ptr [rbx + 16]",
    "mov rdx, qword ptr [rbx + 24]",
    "mov r10, qword ptr [rbx + 32]",
    "mov r8, qword ptr [rbx + 40]",
    "mov r9, qword ptr [rbx + 48]",
    "syscall",
    "mov qword ptr [rbx + 56], rax",
    "add rbx, 64",
    "jmp 2b",
    // Waits for ever, until a tracer interrupts: ppoll(NULL, 0, NULL, NULL).
    "3: mov eax, 271",
    "xor edi, edi",
    "xor esi, esi",
    "xor edx, edx",
    "xor r10d, r10d",
    "syscall",
    "jmp 3b",
    ".globl dormouse_follower_end",
    ".hidden dormouse_follower_end",
    "dormouse_follower_end:",
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

fn between(start: *const u8, end: *const u8) -> &'static [u8] {
    // SAFETY: both are labels of one section, the second after the first, and the bytes between
    // them are never written.
    unsafe { std::slice::from_raw_parts(start, end as usize - start as usize) }
}
