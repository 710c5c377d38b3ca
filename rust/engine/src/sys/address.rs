//! Which host a rank runs on, and the address at which other ranks reach it.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, ToSocketAddrs, UdpSocket};
use std::time::{Duration, Instant};

use trigram_core::{Error, Result};

/// Identifies the memory that ranks could share: the kernel's boot id, the network namespace (so that each namespace
/// counts as a host) and the user.
pub(crate) fn host_name() -> Result<String> {
    let net = std::fs::read_link("/proc/self/ns/net").map_err(unknown)?;
    Ok(format!("{}/{}/{}", boot_id()?, net.display(), rustix::process::geteuid().as_raw()))
}

/// The kernel's boot id: the same for all processes under one kernel, whatever their namespaces.
pub(crate) fn boot_id() -> Result<String> {
    Ok(std::fs::read_to_string("/proc/sys/kernel/random/boot_id").map_err(unknown)?.trim().into())
}

fn unknown(e: std::io::Error) -> Error {
    Error::io("reading this host's identity", e)
}

/// An address of this host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OwnAddress {
    /// The address, without a port.
    pub at: SocketAddr,
    /// Its interface.
    pub device: String,
    /// How many bits all addresses of its network have in common.
    pub prefix: u8,
}

impl OwnAddress {
    /// Whether another address is of its network.
    pub(crate) fn is_near(&self, other: IpAddr) -> bool {
        let head =
            |bits: u128, all: u32| bits.checked_shr(all.saturating_sub(self.prefix.into())).unwrap_or(0);
        match (self.at.ip(), other) {
            (IpAddr::V4(a), IpAddr::V4(b)) => head(a.to_bits().into(), 32) == head(b.to_bits().into(), 32),
            (IpAddr::V6(a), IpAddr::V6(b)) => head(a.to_bits(), 128) == head(b.to_bits(), 128),
            _ => false,
        }
    }
}

/// The address of an interface, which is named by itself or by its address.
///
/// # Errors
///
/// [`Error::Config`] if this host has no such interface, or it is down.
pub(crate) fn interface(wanted: &str) -> Result<OwnAddress> {
    let began = Instant::now();
    loop {
        match (look_up(wanted)?, began.elapsed() < SETTLE) {
            (Ok(found), _) => return Ok(found),
            (Err(down), false) => return Err(down),
            // One that was set up just now is down for a moment.
            (Err(_), true) => std::thread::sleep(SETTLE / 20),
        }
    }
}

/// How long an interface that is set up may be down.
const SETTLE: Duration = Duration::from_secs(2);

/// The inner error: it is down.
fn look_up(wanted: &str) -> Result<Result<OwnAddress>> {
    let all = if_addrs::get_if_addrs().map_err(|e| Error::io("listing network interfaces", e))?;
    let named = all.iter().filter(|i| i.name == wanted || i.ip().to_string() == wanted);
    let Some(found) = named.min_by_key(|i| rank_of(&i.ip())) else {
        let mut known: Vec<String> = all.iter().map(|i| format!("{} ({})", i.name, i.ip())).collect();
        known.sort();
        return Err(Error::Config(format!(
            "TRIGRAM_IFACE={wanted:?} is no network interface or address of this host; it has {}",
            known.join(", ")
        )));
    };
    if !found.is_oper_up() {
        return Ok(Err(Error::Config(format!(
            "TRIGRAM_IFACE={wanted:?}: the interface {} is down; connect its cable and set it up (ip link set {} up), or \
             leave it out",
            found.name, found.name
        ))));
    }
    Ok(Ok(OwnAddress { at: address_of(found), device: found.name.clone(), prefix: prefix(&found.addr) }))
}

/// The address that other ranks connect to where no interface is named: the one on the route to `toward`; otherwise the one on
/// the way to other networks; otherwise the first that is not loopback. No packet is sent to find a route.
pub(crate) fn own_address(toward: Option<&str>) -> Result<OwnAddress> {
    let all = if_addrs::get_if_addrs().map_err(|e| Error::io("listing network interfaces", e))?;
    // Some systems resolve the name of the host itself to 127.0.1.1, where no other host reaches this one.
    let literal = toward.is_some_and(|toward| {
        toward == "localhost" || toward.parse().is_ok_and(|ip: IpAddr| ip.is_loopback())
    });
    let found = toward.and_then(|toward| (toward, 1u16).to_socket_addrs().ok());
    let mut routes = found.into_iter().flatten().filter_map(source).map(|ip| (ip, literal));
    let abroad = [OTHER_NETWORK_4, OTHER_NETWORK_6].into_iter().filter_map(source).map(|ip| (ip, false));
    let chosen = routes.by_ref().chain(abroad).find(|(found, literal)| *literal || !found.ip().is_loopback());
    let candidates = || all.iter().map(|i| (i.ip(), i.is_oper_up() && !is_bridge(&i.name)));
    let at = chosen.map_or_else(|| reachable(candidates()), |(found, _)| found);
    let interface = all.iter().find(|interface| interface.ip() == at.ip());
    let (device, prefix) = interface.map_or((String::new(), u8::MAX), |i| (i.name.clone(), prefix(&i.addr)));
    Ok(OwnAddress { at, device, prefix })
}

fn prefix(address: &if_addrs::IfAddr) -> u8 {
    match address {
        if_addrs::IfAddr::V4(v4) => v4.prefixlen,
        if_addrs::IfAddr::V6(v6) => v6.prefixlen,
    }
}

/// Addresses for documentation: nobody has them, and the way there is the one to all other networks.
const OTHER_NETWORK_4: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::new(192, 0, 2, 1)), 1);
const OTHER_NETWORK_6: SocketAddr =
    SocketAddr::new(IpAddr::V6(Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 1)), 1);

/// The address from which this host would send to another; no port.
fn source(to: SocketAddr) -> Option<SocketAddr> {
    let any: SocketAddr = if to.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" }.parse().ok()?;
    let socket = UdpSocket::bind(any).ok()?;
    socket.connect(to).ok()?;
    let mut found = socket.local_addr().ok()?;
    found.set_port(0);
    Some(found)
}

/// The address of an interface, which a link-local one of IPv6 belongs to.
fn address_of(interface: &if_addrs::Interface) -> SocketAddr {
    let scope = interface.index.filter(|_| is_link_local(&interface.ip()));
    with_scope(SocketAddr::new(interface.ip(), 0), scope.unwrap_or(0))
}

/// The same address on the interface of this number, if it is a link-local one of IPv6: these are the same on all links.
pub(crate) fn with_scope(mut address: SocketAddr, interface: u32) -> SocketAddr {
    if let SocketAddr::V6(v6) = &mut address
        && v6.ip().is_unicast_link_local()
    {
        v6.set_scope_id(interface);
    }
    address
}

/// The interface that an address belongs to, if it is a link-local one of IPv6; else 0.
pub(crate) fn scope(address: &SocketAddr) -> u32 {
    if let SocketAddr::V6(v6) = address { v6.scope_id() } else { 0 }
}

/// Whether this host has the address.
pub(crate) fn is_own(ip: IpAddr) -> bool {
    if_addrs::get_if_addrs().unwrap_or_default().iter().any(|i| i.ip() == ip)
}

/// Whether an interface is a bridge: where another has an address too, it is for containers and virtual machines, and
/// often has the same address on all hosts.
fn is_bridge(name: &str) -> bool {
    std::path::Path::new("/sys/class/net").join(name).join("bridge").exists()
}

/// The address that other hosts reach most likely; that of this host alone if there is none. With each address: whether its
/// interface looks like one that leads to them.
fn reachable(ips: impl Iterator<Item = (IpAddr, bool)>) -> SocketAddr {
    // Nobody can connect to a link-local address of IPv6 who is not told the interface too.
    let ips = ips.filter(|(ip, _)| !ip.is_loopback() && !is_link_local(ip));
    let best = ips.min_by_key(|(ip, leads)| (!leads, rank_of(ip)));
    SocketAddr::new(best.map_or(IpAddr::V4(Ipv4Addr::LOCALHOST), |(ip, _)| ip), 0)
}

fn is_link_local(ip: &IpAddr) -> bool {
    matches!(ip, IpAddr::V6(v6) if v6.is_unicast_link_local())
}

/// IPv4 first, and what is link-local last.
fn rank_of(ip: &IpAddr) -> (bool, bool) {
    (ip.is_ipv6(), is_link_local(ip))
}

/// Names and addresses of this machine's interfaces.
pub fn interfaces() -> Vec<(String, String)> {
    let all = if_addrs::get_if_addrs().unwrap_or_default();
    all.into_iter().map(|i| (i.name.clone(), i.ip().to_string())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_that_others_reach_is_chosen() {
        let of = |ips: &[(&str, bool)]| {
            reachable(ips.iter().map(|(ip, leads)| (ip.parse().unwrap(), *leads))).ip().to_string()
        };
        assert_eq!(
            of(&[("::1", true), ("fe80::1", true), ("fd00::2", true), ("10.0.0.3", true)]),
            "10.0.0.3"
        );
        assert_eq!(of(&[("::1", true), ("fe80::1", true), ("fd00::2", true)]), "fd00::2");
        assert_eq!(of(&[("127.0.0.1", true), ("fe80::1", true)]), "127.0.0.1");
        assert_eq!(of(&[("172.17.0.1", false), ("10.0.0.3", true)]), "10.0.0.3", "a bridge without hosts");
        assert_eq!(of(&[("172.17.0.1", false)]), "172.17.0.1");
    }

    #[test]
    fn a_link_local_address_is_used_on_an_interface() {
        let at = |text: &str| with_scope(text.parse().unwrap(), 7);
        assert_eq!(at("[fe80::1]:80").to_string(), "[fe80::1%7]:80");
        assert_eq!(at("[fd00::1]:80").to_string(), "[fd00::1]:80");
        assert_eq!(scope(&at("[fe80::1]:80")), 7);
        assert_eq!(scope(&at("10.0.0.1:80")), 0);
    }
}
