//! Errors of system calls that a limit of the process or of the machine refused: they name the limit.

use rustix::io::Errno;
use trigram_core::Error;

/// The error of a system call.
pub fn refused(what: impl Into<String>, errno: Errno) -> Error {
    let advice = match errno {
        Errno::MFILE => "this process has as many open files as it may: raise the limit with ulimit -n",
        Errno::NFILE => "this machine has as many open files as it may: raise the sysctl fs.file-max",
        Errno::NOMEM => {
            "there is no memory left for it: raise the limit of this process (ulimit -v), of its container, or the sysctl \
             vm.max_map_count, or let the program use less"
        }
        Errno::FBIG => "shared memory counts as a file: raise the limit of this process with ulimit -f",
        _ => return Error::io(what, errno),
    };
    Error::io(what, format!("{errno}; {advice}"))
}
