//! Ways to a rank: its address, the one that others see of it, or a rank that both reach.
//!
//! A rank behind a router that translates addresses (NAT) can connect to others, and nobody to it: it *only connects
//! outwards*. Of two ranks the higher connects to the lower, unless only the lower connects outwards. Two that both do are
//! perhaps in one network; otherwise their bytes pass through the lowest rank that others reach ([`super::relay`]).

use std::net::{IpAddr, SocketAddr, TcpListener, ToSocketAddrs};

use trigram_core::{Error, Result};

use crate::bootstrap::cables::Cable;

/// How others reach this rank, as its environment says.
#[derive(Clone, Debug, Default)]
pub struct Reach {
    /// The first port that is free of these; 0 to 0: any.
    ports: (u16, u16),
    /// The address that others see of it.
    pub announced: Option<SocketAddr>,
    /// It only connects outwards.
    pub outward: bool,
}

impl Reach {
    /// `TRIGRAM_PORT`, `TRIGRAM_ANNOUNCE` and `TRIGRAM_OUTWARD`.
    pub fn from_env() -> Result<Self> {
        let of = |name| std::env::var(name).unwrap_or_default();
        let wrong = |name: &str, value: &str, right: &str| {
            Error::Config(format!("{name}={value:?} is invalid; set it to {right}"))
        };
        let ports = of("TRIGRAM_PORT");
        let (first, last) = ports.split_once('-').unwrap_or((&ports, &ports));
        let right = "a port, or a range of ports such as 29600-29607";
        let number = |text: &str| text.parse::<u16>().ok().filter(|port| *port > 0);
        let ports = match (ports.is_empty(), number(first).zip(number(last))) {
            (true, _) => (0, 0),
            (false, Some((first, last))) if first <= last => (first, last),
            _ => return Err(wrong("TRIGRAM_PORT", &ports, right)),
        };
        let outward = of("TRIGRAM_OUTWARD");
        if !matches!(outward.as_str(), "" | "0" | "1") {
            return Err(wrong("TRIGRAM_OUTWARD", &outward, "1 or 0"));
        }
        let announced = of("TRIGRAM_ANNOUNCE");
        let announced = match announced.as_str() {
            "" => None,
            _ if outward == "1" => {
                let what = "TRIGRAM_ANNOUNCE and TRIGRAM_OUTWARD=1 exclude each other: nobody connects to such a rank";
                return Err(Error::Config(what.into()));
            }
            host => Some(resolve(host).ok_or_else(|| {
                wrong(
                    "TRIGRAM_ANNOUNCE",
                    host,
                    "an address or a name, and if it is another, a port: HOST:PORT",
                )
            })?),
        };
        Ok(Self { ports, announced, outward: outward == "1" })
    }

    /// Listens at an address of this host, at a port that is free. The port that others see is the same unless a setting says
    /// another.
    pub fn listen(&mut self, at: SocketAddr) -> Result<TcpListener> {
        let ip = at.ip();
        let listening = |e| Error::io(format!("listening on {ip}"), e);
        let mut failed = None;
        for port in self.ports.0..=self.ports.1 {
            let mut at = at;
            at.set_port(port);
            match TcpListener::bind(at) {
                Ok(listener) => {
                    let port = listener.local_addr().map_err(listening)?.port();
                    if let Some(announced) = self.announced.as_mut().filter(|seen| seen.port() == 0) {
                        announced.set_port(port);
                    }
                    return Ok(listener);
                }
                Err(e) => failed = Some(e),
            }
        }
        let Some(e) = failed else { return Err(Error::misuse("no port to listen at")) };
        match self.ports {
            (0, _) => Err(listening(e)),
            (first, last) => Err(Error::io(
                format!("listening on {ip}, TRIGRAM_PORT={first}-{last}"),
                format!("no port of these is free: {e}"),
            )),
        }
    }
}

/// Port 0 if it names none.
fn resolve(host: &str) -> Option<SocketAddr> {
    let found = |all: std::vec::IntoIter<SocketAddr>| all.min_by_key(SocketAddr::is_ipv6);
    if let Ok(ip) = host.parse::<IpAddr>() {
        return Some(SocketAddr::new(ip, 0));
    }
    let has_port = host.rsplit_once(':').is_some_and(|(_, port)| port.parse::<u16>().is_ok());
    match has_port {
        true => host.to_socket_addrs().ok().and_then(found),
        false => (host, 0).to_socket_addrs().ok().and_then(found),
    }
}

/// How to get to a rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Route {
    /// To an address.
    Direct(SocketAddr),
    /// Through another rank, which listens there.
    Through(u32, SocketAddr),
}

impl std::fmt::Display for Route {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Direct(address) => write!(f, "{address}"),
            Self::Through(rank, address) => write!(f, "rank {rank} at {address}"),
        }
    }
}

/// Where a rank is.
#[derive(Clone, Copy, Debug)]
pub struct Site {
    /// The rank.
    pub rank: u32,
    /// Where it listens.
    pub address: SocketAddr,
    /// What others see of that.
    pub announced: Option<SocketAddr>,
    /// It only connects outwards.
    pub outward: bool,
}

/// A rank that this one connects with.
#[derive(Clone, Debug)]
pub struct Peer {
    /// The rank.
    pub rank: u32,
    /// Whether this rank connects to it, and not it to this one.
    pub called: bool,
    /// The ways to it, the likeliest first.
    pub routes: Vec<Route>,
    /// If both have several, the interfaces of this rank and the addresses of the other to which they lead.
    pub cables: Vec<Cable>,
    /// Both only connect outwards: this rank may have to pass on what they send each other, and at which address.
    pub relay: Option<(u32, SocketAddr)>,
}

impl Peer {
    /// A rank that others reach at this address, as `me` does.
    pub fn direct(me: u32, rank: u32, address: SocketAddr) -> Self {
        Self {
            rank,
            called: rank < me,
            routes: vec![Route::Direct(address)],
            cables: Vec::new(),
            relay: None,
        }
    }

    /// As their sites say. `relay`: the site of the rank that passes on what those send that nobody reaches.
    pub fn at(me: &Site, other: &Site, relay: Option<&Site>) -> Self {
        let called = match me.outward == other.outward {
            true => other.rank < me.rank,
            false => me.outward,
        };
        // In its own network the relay may not be reached at the address that others see.
        let near = |site: &Site| is_near(me.address.ip(), site.address.ip());
        let seen = |site: &Site| site.announced.filter(|_| !near(site)).unwrap_or(site.address);
        let through = |site: &Site| (site.rank, seen(site));
        let relay = relay.filter(|_| me.outward && other.outward).map(through);
        let far = [other.announced.map(Route::Direct), relay.map(|(rank, at)| Route::Through(rank, at))];
        let near = Route::Direct(other.address);
        let mut routes: Vec<Route> = far.into_iter().flatten().collect();
        let at = if is_near(me.address.ip(), other.address.ip()) { 0 } else { routes.len() };
        routes.insert(at, near);
        Self { rank: other.rank, called, routes, cables: Vec::new(), relay }
    }

    /// The same, if both have several interfaces.
    pub fn over(mut self, cables: Vec<Cable>) -> Self {
        self.cables = if cables.len() > 1 { cables } else { Vec::new() };
        self
    }
}

/// Whether two addresses are probably of one network.
fn is_near(a: IpAddr, b: IpAddr) -> bool {
    match (a, b) {
        (IpAddr::V4(a), IpAddr::V4(b)) => a.octets()[..2] == b.octets()[..2],
        (IpAddr::V6(a), IpAddr::V6(b)) => a.segments()[..4] == b.segments()[..4],
        _ => false,
    }
}

/// The rank that passes on what two ranks send each other that nobody reaches: the lowest that others reach.
pub fn relay(sites: &[Site]) -> Option<&Site> {
    let reached = sites.iter().filter(|site| !site.outward).min_by_key(|site| site.rank);
    reached.filter(|_| sites.iter().filter(|site| site.outward).count() > 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn site(rank: u32, address: &str, announced: Option<&str>, outward: bool) -> Site {
        let at = |text: &str| text.parse().unwrap();
        Site { rank, address: at(address), announced: announced.map(at), outward }
    }

    #[test]
    fn who_calls_whom_and_how() {
        let cloud = site(1, "10.0.0.5:1000", Some("203.0.113.7:1000"), false);
        let home = site(0, "192.168.1.5:2000", None, true);
        let other = site(2, "172.16.7.1:3000", None, true);
        let same = site(3, "192.168.1.9:4000", None, true);
        let sites = [home, cloud, other, same];
        let via = relay(&sites);
        assert_eq!(via.unwrap().rank, 1);
        let (to, from) = (Peer::at(&home, &cloud, via), Peer::at(&cloud, &home, via));
        assert!(to.called && !from.called, "who only connects outwards calls, also if it is lower");
        let seen = Route::Direct(cloud.announced.unwrap());
        assert_eq!(to.routes, [seen, Route::Direct(cloud.address)]);
        let (to, from) = (Peer::at(&other, &home, via), Peer::at(&home, &other, via));
        assert!(to.called && !from.called, "the higher one calls");
        let through = Route::Through(1, "203.0.113.7:1000".parse().unwrap());
        assert_eq!(to.routes, [through, Route::Direct(home.address)]);
        let to = Peer::at(&same, &home, via);
        assert_eq!(to.routes, [Route::Direct(home.address), through], "in one network");
        assert!(Peer::at(&cloud, &home, via).relay.is_none());
        assert!(relay(&sites[..2]).is_none(), "nobody needs it");
        assert!(relay(&[home, other]).is_none(), "nobody could be it");
    }
}
