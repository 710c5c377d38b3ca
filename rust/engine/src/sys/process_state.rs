//! What the kernel knows of another process: why it may be silent.

use std::fs::read_to_string;

/// Why a process does not run, as far as `/proc` and the cgroups tell; empty if they tell nothing.
pub(crate) fn why_silent(pid: i32) -> &'static str {
    let Ok(status) = read_to_string(format!("/proc/{pid}/status")) else { return "" };
    let field = |name: &str| status.lines().find_map(|line| line.strip_prefix(name)).map_or("", str::trim);
    if field("CoreDumping:") == "1" {
        return "its process has crashed and is writing a core dump";
    }
    match field("State:").chars().next() {
        Some('T') => "its process is stopped by a signal",
        Some('t') => "its process is stopped by a debugger",
        Some('Z' | 'X') => "its process has ended, and its parent has not taken note of that",
        _ if is_frozen(pid) => "its container is frozen",
        Some('D') => "its process waits for a disk, or for another device",
        _ => "",
    }
}

/// Whether the process has crashed and is writing a core dump. It runs no more code, but its connections stay open until
/// the dump is complete.
pub(crate) fn is_dumping_core(pid: i32) -> bool {
    let status = read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let field = status.lines().find_map(|line| line.strip_prefix("CoreDumping:"));
    field.is_some_and(|value| value.trim() == "1")
}

/// Whether the process is in a frozen cgroup, of version 1 or 2.
fn is_frozen(pid: i32) -> bool {
    let groups = read_to_string(format!("/proc/{pid}/cgroup")).unwrap_or_default();
    let says = |file: String, word: &str| {
        read_to_string(file).is_ok_and(|text| text.lines().any(|line| line.trim() == word))
    };
    // Each line: a number, the controllers of a hierarchy of version 1, and the process's group in it.
    groups.lines().any(|line| match *line.splitn(3, ':').collect::<Vec<_>>() {
        [_, "", path] => ["", "/unified"]
            .iter()
            .any(|root| says(format!("/sys/fs/cgroup{root}{path}/cgroup.events"), "frozen 1")),
        [_, controllers, path] if controllers.split(',').any(|name| name == "freezer") => {
            says(format!("/sys/fs/cgroup/freezer{path}/freezer.state"), "FROZEN")
        }
        _ => false,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stopped_process_is_recognized() {
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let pid = child.id() as i32;
        let signal = |number| {
            let pid = rustix::process::Pid::from_raw(pid).unwrap();
            rustix::process::kill_process(pid, number).unwrap();
        };
        let becomes = |right: &dyn Fn(&str) -> bool| {
            let began = std::time::Instant::now();
            while !right(why_silent(pid)) {
                assert!(began.elapsed().as_secs() < 60, "{}", why_silent(pid));
                std::thread::sleep(std::time::Duration::from_millis(5));
            }
        };
        becomes(&|why| !why.contains("stopped"));
        signal(rustix::process::Signal::STOP);
        becomes(&|why| why == "its process is stopped by a signal");
        signal(rustix::process::Signal::CONT);
        becomes(&|why| !why.contains("stopped"));
        signal(rustix::process::Signal::KILL);
        becomes(&|why| why.contains("has ended"));
        child.wait().unwrap();
        assert_eq!(why_silent(pid), "");
    }
}
