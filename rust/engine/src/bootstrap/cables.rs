//! Hosts with several cables: which interface of this rank leads to which of another's.
//!
//! `TRIGRAM_IFACE=eth0,eth1` names them. Two ranks that both have several open a connection over each pair of them, and use
//! all as one ([`crate::transport::bundle`]).

use std::net::{IpAddr, SocketAddr};
use std::os::fd::AsFd;

use socket2::SockRef;
use tokio::net::{TcpSocket, TcpStream};
use trigram_core::{Error, Result};

use crate::sys::address::{OwnAddress, scope, with_scope};

/// A connection from an interface of this rank to an address of another.
#[derive(Clone, Debug)]
pub struct Cable {
    /// Where this rank sends from.
    pub from: OwnAddress,
    /// Where the other listens.
    pub to: SocketAddr,
}

/// Which of this rank's interfaces leads to which address of another rank: those of one network first, the rest in the order
/// in which they were named.
pub fn pairs(mine: &[OwnAddress], theirs: &[SocketAddr]) -> Vec<Cable> {
    let mut mine: Vec<&OwnAddress> = mine.iter().collect();
    let mut cables: Vec<Option<Cable>> = theirs.iter().map(|_| None).collect();
    for is_near in [true, false] {
        for (cable, to) in cables.iter_mut().zip(theirs) {
            let leads =
                |own: &&OwnAddress| own.at.is_ipv4() == to.is_ipv4() && (!is_near || own.is_near(to.ip()));
            if let Some(k) = mine.iter().position(leads).filter(|_| cable.is_none()) {
                let from = mine.remove(k).clone();
                // A link-local address is one on this rank's interface.
                *cable = Some(Cable { to: with_scope(*to, scope(&from.at)), from });
            }
        }
    }
    cables.into_iter().flatten().collect()
}

/// Keeps what a connection sends on one interface. Some systems let only root do it: then addresses alone decide. Who listens is
/// not kept on one: what is for one interface may come by another of the same network.
fn keep_on(socket: &impl AsFd, device: &str) {
    let _ = SockRef::from(socket).bind_device(Some(device.as_bytes()));
}

impl Cable {
    /// Connects over it.
    pub async fn connect(&self) -> std::io::Result<TcpStream> {
        let socket = match self.to.ip() {
            IpAddr::V4(_) => TcpSocket::new_v4()?,
            IpAddr::V6(_) => TcpSocket::new_v6()?,
        };
        keep_on(&socket, &self.from.device);
        socket.bind(self.from.at)?;
        socket.connect(self.to).await
    }
}

impl std::fmt::Display for Cable {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} ({}) to {}", self.from.device, self.from.at.ip(), self.to)
    }
}

/// What `TRIGRAM_IFACE` names.
///
/// # Errors
///
/// [`Error::Config`] if it names nothing between two commas, or an interface twice.
pub fn names(iface: &str) -> Result<Vec<&str>> {
    let names: Vec<&str> = iface.split(',').map(str::trim).collect();
    let wrong = |what: &str| {
        Err(Error::Config(format!(
            "TRIGRAM_IFACE={iface:?} {what}; set it to interfaces or addresses of this host, with commas in between"
        )))
    };
    if names.iter().any(|name| name.is_empty()) {
        return wrong("has an empty name");
    }
    if names.len() > usize::from(crate::transport::far::MOST_STREAMS) {
        return wrong("names too many");
    }
    match names.iter().enumerate().find(|(i, name)| names[..*i].contains(name)) {
        Some((_, name)) => wrong(&format!("names {name} twice")),
        None => Ok(names),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn own(at: &str, device: &str, prefix: u8) -> OwnAddress {
        OwnAddress { at: at.parse().unwrap(), device: device.into(), prefix }
    }

    fn told(mine: &[OwnAddress], theirs: &[&str]) -> Vec<String> {
        let theirs: Vec<SocketAddr> = theirs.iter().map(|at| at.parse().unwrap()).collect();
        pairs(mine, &theirs).iter().map(|cable| format!("{}-{}", cable.from.device, cable.to.ip())).collect()
    }

    #[test]
    fn who_leads_to_whom() {
        let two = [own("10.0.0.2:0", "a", 24), own("10.0.1.2:0", "b", 24)];
        assert_eq!(told(&two, &["10.0.0.1:7", "10.0.1.1:7"]), ["a-10.0.0.1", "b-10.0.1.1"]);
        assert_eq!(told(&two, &["10.0.1.1:7", "10.0.0.1:7"]), ["b-10.0.1.1", "a-10.0.0.1"], "by network");
        assert_eq!(told(&two, &["10.9.1.1:7", "10.8.0.1:7"]), ["a-10.9.1.1", "b-10.8.0.1"], "in their order");
        assert_eq!(told(&two[1..], &["10.0.0.1:7", "10.0.1.1:7"]), ["b-10.0.1.1"], "the one that it reaches");
        assert_eq!(told(&two, &["10.0.1.1:7"]), ["b-10.0.1.1"]);
        let one_network = [own("10.0.0.2:0", "a", 16), own("10.0.1.2:0", "b", 16)];
        assert_eq!(told(&one_network, &["10.0.1.1:7", "10.0.0.1:7"]), ["a-10.0.1.1", "b-10.0.0.1"]);
        assert_eq!(told(&[own("[fd00::2]:0", "a", 64)], &["[fd00::1]:7"]), ["a-fd00::1"]);
        assert_eq!(told(&two[1..], &["[fd00::1]:7", "10.9.0.1:7"]), ["b-10.9.0.1"], "of its family");
        let local = pairs(&[own("[fe80::2%3]:0", "a", 64)], &["[fe80::1]:7".parse().unwrap()]);
        assert_eq!(local[0].to.to_string(), "[fe80::1%3]:7");
    }

    #[test]
    fn names_are_checked() {
        assert_eq!(names("eth0, eth1").unwrap(), ["eth0", "eth1"]);
        for (wrong, what) in [("eth0,", "empty"), ("a,b,a", "a twice"), (",", "empty")] {
            assert!(names(wrong).unwrap_err().to_string().contains(what), "{wrong}");
        }
    }
}
