//! Threads in C++ that come back to an interpreter that ends.
//!
//! CPython before 3.14 ends such a thread where it is, by an unwinding that C++ does not let through its destructors: it
//! takes that for an error and ends the whole process, whose work was done, with SIGABRT. Our own threads stay out of an
//! interpreter that ends (invariant PY-4); those in a call of torch's stores cannot be told.

use std::sync::atomic::{AtomicI32, AtomicPtr, Ordering};

/// The thread that ends the interpreter.
static ENDING: AtomicI32 = AtomicI32::new(0);
/// What C++ called before.
static BEFORE: AtomicPtr<libc::c_void> = AtomicPtr::new(std::ptr::null_mut());

/// From now on a thread that C++ would end the process for waits for the process to end. The caller is the thread that
/// ends the interpreter: for that one nothing changes.
pub fn keep_threads_out() {
    ENDING.store(thread(), Ordering::Release);
    // SAFETY: the names end with NUL, and a library that is not loaded is not loaded now.
    let set = unsafe {
        let library = libc::dlopen(c"libstdc++.so.6".as_ptr(), libc::RTLD_LAZY | libc::RTLD_NOLOAD);
        if library.is_null() {
            return;
        }
        libc::dlsym(library, c"_ZSt13set_terminatePFvvE".as_ptr())
    };
    if set.is_null() {
        return;
    }
    // SAFETY: this is std::set_terminate, which takes and returns a function without arguments.
    let set: extern "C" fn(*mut libc::c_void) -> *mut libc::c_void = unsafe { std::mem::transmute(set) };
    let ours = terminate as extern "C" fn() as *mut libc::c_void;
    let before = set(ours);
    if before != ours {
        BEFORE.store(before, Ordering::Release);
    }
}

extern "C" fn terminate() {
    while thread() != ENDING.load(Ordering::Acquire) {
        // SAFETY: no requirements. Not `park`: what Rust keeps for a thread may be gone.
        unsafe { libc::pause() };
    }
    let before = BEFORE.load(Ordering::Acquire);
    if !before.is_null() {
        // SAFETY: C++ returned this function, which has no arguments.
        let before: extern "C" fn() = unsafe { std::mem::transmute(before) };
        before();
    }
    std::process::abort();
}

/// This thread's number in the kernel.
fn thread() -> i32 {
    rustix::thread::gettid().as_raw_nonzero().get()
}
