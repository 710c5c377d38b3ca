//! Errors of system calls that a limit of the process or of the machine refused: they name the limit.

use rustix::io::Errno;
use trigram_core::Error;

/// The error of a system call.
pub fn refused(what: impl Into<String>, errno: Errno) -> Error {
    let advice = match errno {
        Errno::MFILE => "this process has as many open files as it may: raise the limit with ulimit -n",
        Errno::NFILE => "this machine has as many open files as it may: raise the sysctl fs.file-max",
        _ => return Error::io(what, errno),
    };
    Error::io(what, format!("{errno}; {advice}"))
}
