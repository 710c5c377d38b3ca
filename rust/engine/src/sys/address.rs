//! Which host a rank runs on, and the address at which other ranks reach it.

use std::net::{IpAddr, Ipv4Addr, SocketAddr, ToSocketAddrs, UdpSocket};

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

/// The address that other ranks connect to: that of the named interface; otherwise the one on the route to `toward`
/// (no packet is sent to find it); otherwise the first that is not loopback.
pub(crate) fn own_address(iface: Option<&str>, toward: Option<&str>) -> Result<IpAddr> {
    let all = if_addrs::get_if_addrs().map_err(|e| Error::io("listing network interfaces", e))?;
    if let Some(wanted) = iface {
        let named = all.iter().filter(|i| i.name == wanted || i.ip().to_string() == wanted);
        return named.map(if_addrs::Interface::ip).min_by_key(rank_of).ok_or_else(|| {
            let mut known: Vec<String> = all.iter().map(|i| format!("{} ({})", i.name, i.ip())).collect();
            known.sort();
            Error::Config(format!(
                "TRIGRAM_IFACE={wanted:?} is no network interface or address of this host; it has {}",
                known.join(", ")
            ))
        });
    }
    if let Some(toward) = toward {
        let found = (toward, 1u16).to_socket_addrs().ok().into_iter().flatten().find_map(|to| {
            let any: SocketAddr = if to.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" }.parse().ok()?;
            let socket = UdpSocket::bind(any).ok()?;
            socket.connect(to).ok()?;
            socket.local_addr().ok().map(|a| a.ip())
        });
        // Some systems resolve the name of the host itself to 127.0.1.1, where no other host reaches this one.
        let literal = toward == "localhost" || toward.parse().is_ok_and(|ip: IpAddr| ip.is_loopback());
        if let Some(ip) = found.filter(|ip| literal || !ip.is_loopback()) {
            return Ok(ip);
        }
    }
    Ok(reachable(all.iter().map(if_addrs::Interface::ip)))
}

/// The address that other hosts reach most likely; that of this host alone if there is none.
fn reachable(ips: impl Iterator<Item = IpAddr>) -> IpAddr {
    // Nobody can connect to a link-local address of IPv6 who is not told the interface too.
    ips.filter(|ip| !ip.is_loopback() && !is_link_local(ip))
        .min_by_key(rank_of)
        .unwrap_or(IpAddr::V4(Ipv4Addr::LOCALHOST))
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
        let of = |ips: &[&str]| reachable(ips.iter().map(|ip| ip.parse().unwrap())).to_string();
        assert_eq!(of(&["::1", "fe80::1", "fd00::2", "10.0.0.3"]), "10.0.0.3");
        assert_eq!(of(&["::1", "fe80::1", "fd00::2"]), "fd00::2");
        assert_eq!(of(&["127.0.0.1", "fe80::1"]), "127.0.0.1");
    }
}
