//! The network interfaces that NCCL may use: its devices.

use std::env;
use std::ffi::CString;
use std::fs;
use std::net::IpAddr;
use std::os::unix::ffi::OsStrExt;
use std::sync::OnceLock;

use crate::error::{Error, Result};

/// What NCCL's own socket transport assumes where the kernel does not know, in Mbit/s.
const USUAL_SPEED: i32 = 10_000;

/// An interface.
#[derive(Debug)]
pub(crate) struct Device {
    /// Its name.
    pub(crate) name: CString,
    /// Its address.
    pub(crate) ip: IpAddr,
    /// In Mbit/s.
    pub(crate) speed: i32,
    /// Where it is on the machine's buses, if it is hardware.
    pub(crate) pci_path: Option<CString>,
}

static DEVICES: OnceLock<Vec<Device>> = OnceLock::new();

/// Looks for devices, the first time; NCCL keeps their strings, so they stay.
pub(crate) fn find() -> Result<&'static [Device]> {
    if let Some(devices) = DEVICES.get() {
        return Ok(devices);
    }
    let own = env::var("TRIGRAM_IFACE").ok().filter(|value| !value.is_empty());
    let nccl = env::var("NCCL_SOCKET_IFNAME").ok().filter(|value| !value.is_empty());
    let all = if_addrs::get_if_addrs().map_err(|e| Error::io("listing network interfaces", &e))?;
    let usable = all.iter().filter(|i| i.is_oper_up() && !is_link_local(i.ip()));
    let found: Vec<(String, IpAddr)> = usable.map(|i| (i.name.clone(), i.ip())).collect();
    let chosen = choose(found, own.as_deref(), nccl.as_deref());
    if chosen.is_empty() {
        let known: Vec<String> = all.iter().map(|i| format!("{} ({})", i.name, i.ip())).collect();
        let setting = own.map(|value| format!(" for TRIGRAM_IFACE={value}"));
        let setting = setting.or_else(|| nccl.map(|value| format!(" for NCCL_SOCKET_IFNAME={value}")));
        let setting = setting.unwrap_or_default();
        return Err(Error::system(format!(
            "no network interface{setting}; this host has {}",
            known.join(", ")
        )));
    }
    let devices = chosen.into_iter().map(|(name, ip)| Device {
        speed: speed(&name),
        pci_path: pci_path(&name),
        name: CString::new(name).unwrap_or_default(),
        ip,
    });
    Ok(DEVICES.get_or_init(|| devices.collect()))
}

/// The device of that number.
pub(crate) fn get(number: i32) -> Result<&'static Device> {
    let devices = DEVICES.get().ok_or_else(|| Error::usage("NCCL did not call init first"))?;
    let device = usize::try_from(number).ok().and_then(|number| devices.get(number));
    device.ok_or_else(|| {
        Error::argument(format!("NCCL asked for device {number}; there are {}", devices.len()))
    })
}

/// One address per interface. `own` has names or addresses with commas in between, `nccl` is NCCL's list; with neither, loopback is for
/// machines that have nothing else, and so is what Docker makes.
fn choose(all: Vec<(String, IpAddr)>, own: Option<&str>, nccl: Option<&str>) -> Vec<(String, IpAddr)> {
    let mut found = all;
    found.sort_by_key(|(_, ip)| ip.is_ipv6());
    if let Some(own) = own {
        let own: Vec<&str> = own.split(',').map(str::trim).collect();
        found.retain(|(name, ip)| own.iter().any(|own| name == own || ip.to_string() == *own));
    } else if let Some(list) = nccl {
        let filter = Filter::read(list);
        found.retain(|(name, _)| filter.takes(name));
    } else {
        let rank = |(name, ip): &(String, IpAddr)| {
            if ip.is_loopback() { 2 } else { u8::from(name.starts_with("docker")) }
        };
        let best = found.iter().map(rank).min();
        found.retain(|interface| Some(rank(interface)) == best);
    }
    let mut chosen: Vec<(String, IpAddr)> = Vec::new();
    for (name, ip) in found {
        if chosen.iter().all(|(taken, _)| *taken != name) {
            chosen.push((name, ip));
        }
    }
    chosen
}

/// `NCCL_SOCKET_IFNAME`: prefixes with commas between them; `^` excludes them, `=` wants whole names.
struct Filter<'a> {
    exclude: bool,
    exact: bool,
    names: Vec<&'a str>,
}

impl<'a> Filter<'a> {
    fn read(list: &'a str) -> Self {
        let (exclude, list) = list.strip_prefix('^').map_or((false, list), |rest| (true, rest));
        let (exact, list) = list.strip_prefix('=').map_or((false, list), |rest| (true, rest));
        let names = list.split(',').map(|name| name.split(':').next().unwrap_or(name).trim());
        Self { exclude, exact, names: names.filter(|name| !name.is_empty()).collect() }
    }

    fn takes(&self, name: &str) -> bool {
        let mut wanted = self.names.iter();
        let named = wanted.any(|&prefix| if self.exact { name == prefix } else { name.starts_with(prefix) });
        named != self.exclude
    }
}

fn is_link_local(ip: IpAddr) -> bool {
    // These need a scope, which is a number that only this host knows.
    matches!(ip, IpAddr::V6(ip) if ip.is_unicast_link_local())
}

fn speed(name: &str) -> i32 {
    let text = fs::read_to_string(format!("/sys/class/net/{name}/speed")).unwrap_or_default();
    text.trim().parse().ok().filter(|&speed| speed > 0).unwrap_or(USUAL_SPEED)
}

fn pci_path(name: &str) -> Option<CString> {
    let path = fs::canonicalize(format!("/sys/class/net/{name}/device")).ok()?;
    CString::new(path.as_os_str().as_bytes()).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(own: Option<&str>, nccl: Option<&str>) -> Vec<String> {
        let all = [("lo", "127.0.0.1"), ("eth0", "fd00::1"), ("eth0", "10.0.0.1"), ("eth1", "10.0.1.1")];
        let all = all.iter().chain([("eth10", "10.0.2.1"), ("docker0", "172.17.0.1")].iter());
        let all = all.map(|(name, ip)| ((*name).to_owned(), ip.parse().unwrap())).collect();
        choose(all, own, nccl).into_iter().map(|(name, ip)| format!("{name} {ip}")).collect()
    }

    #[test]
    fn interfaces_are_chosen_as_nccl_would() {
        let eths = ["eth0 10.0.0.1", "eth1 10.0.1.1", "eth10 10.0.2.1"];
        assert_eq!(names(None, None), eths);
        assert_eq!(names(None, Some("eth")), eths);
        assert_eq!(names(None, Some("eth1")), &eths[1..]);
        assert_eq!(names(None, Some("=eth1")), ["eth1 10.0.1.1"]);
        assert_eq!(names(None, Some("=eth1,lo")), ["lo 127.0.0.1", "eth1 10.0.1.1"]);
        assert_eq!(names(None, Some("^eth,docker")), ["lo 127.0.0.1"]);
        assert_eq!(names(None, Some("^=eth1,lo,docker0")), ["eth0 10.0.0.1", "eth10 10.0.2.1"]);
        assert!(names(None, Some("ib")).is_empty());
    }

    #[test]
    fn our_variable_comes_first() {
        assert_eq!(names(Some("lo"), Some("eth")), ["lo 127.0.0.1"]);
        assert_eq!(names(Some("10.0.1.1"), None), ["eth1 10.0.1.1"]);
        assert_eq!(names(Some("fd00::1"), None), ["eth0 fd00::1"]);
        assert!(names(Some("eth"), None).is_empty());
        assert_eq!(names(Some("eth0, eth1"), None), ["eth0 10.0.0.1", "eth1 10.0.1.1"]);
    }

    #[test]
    fn loopback_where_nothing_else_is() {
        let only = vec![("lo".to_owned(), "127.0.0.1".parse().unwrap())];
        assert_eq!(choose(only.clone(), None, None), only);
    }
}
