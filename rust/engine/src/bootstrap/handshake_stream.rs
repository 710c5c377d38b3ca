//! A connection between hosts during the handshake: TCP, plain or under TLS.

use std::io::{Error, ErrorKind, Read as _, Result, Write as _};
use std::os::fd::AsFd as _;

use tokio::net::TcpStream;

use crate::security::proofs::Binding;
use crate::transport::stream::{Receiver, Sender};
use crate::transport::{far, tcp, tls};

/// This rank's end of the connection.
#[derive(Debug)]
pub struct HandshakeStream {
    stream: TcpStream,
    tls: Option<Box<rustls::Connection>>,
}

impl HandshakeStream {
    /// Wraps a connection. If a TLS session is given, completes its handshake.
    pub async fn open(stream: TcpStream, tls: Option<rustls::Connection>) -> Result<Self> {
        let mut stream = Self { stream, tls: tls.map(Box::new) };
        while stream.tls.as_ref().is_some_and(|tls| tls.is_handshaking()) {
            stream.flush().await?;
            if stream.tls.as_ref().is_some_and(|tls| tls.is_handshaking()) {
                stream.take_in().await?;
            }
        }
        stream.flush().await?;
        Ok(stream)
    }

    /// What proofs on this connection are bound to.
    pub fn binding(&self) -> Result<Binding> {
        let Some(tls) = &self.tls else { return Ok(Binding::Plain) };
        let name = tls.export_keying_material([0; 32], b"EXPORTER-trigram-channel", None);
        Ok(Binding::Tls(name.map_err(Error::other)?))
    }

    /// Sends all bytes.
    pub async fn write(&mut self, mut bytes: &[u8]) -> Result<()> {
        if let Some(tls) = &mut self.tls {
            tls.writer().write_all(bytes)?;
            return self.flush().await;
        }
        while !bytes.is_empty() {
            self.stream.writable().await?;
            match self.stream.try_write(bytes) {
                Ok(n) => bytes = &bytes[n..],
                Err(e) if e.kind() == ErrorKind::WouldBlock => {}
                Err(e) => return Err(e),
            }
        }
        Ok(())
    }

    /// Fills `into`.
    pub async fn read(&mut self, mut into: &mut [u8]) -> Result<()> {
        while !into.is_empty() {
            let read = match &mut self.tls {
                Some(tls) => tls.reader().read(into),
                None => {
                    self.stream.readable().await?;
                    self.stream.try_read(into)
                }
            };
            match read {
                Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
                Ok(n) => into = &mut into[n..],
                Err(e) if e.kind() == ErrorKind::WouldBlock => {
                    if self.tls.is_some() {
                        self.take_in().await?;
                        self.flush().await?;
                    }
                }
                Err(e) => return Err(e),
            }
        }
        Ok(())
    }

    /// Writes what the TLS session has to send.
    async fn flush(&mut self) -> Result<()> {
        let Self { stream, tls: Some(tls) } = self else { return Ok(()) };
        while tls.wants_write() {
            stream.writable().await?;
            match tls.write_tls(&mut Raw(stream)) {
                Err(e) if e.kind() != ErrorKind::WouldBlock => return Err(e),
                _ => {}
            }
        }
        Ok(())
    }

    /// Passes what has arrived to the TLS session.
    async fn take_in(&mut self) -> Result<()> {
        let Self { stream, tls: Some(tls) } = self else { return Ok(()) };
        stream.readable().await?;
        match tls.read_tls(&mut Raw(stream)) {
            Ok(0) => Err(ErrorKind::UnexpectedEof.into()),
            Ok(_) => tls.process_new_packets().map(drop).map_err(Error::other),
            Err(e) if e.kind() == ErrorKind::WouldBlock => Ok(()),
            Err(e) => Err(e),
        }
    }

    /// Its two addresses, this rank's first.
    pub fn addresses(&self) -> String {
        let name = |address: Result<std::net::SocketAddr>| address.map_or("?".into(), |at| at.to_string());
        format!("{} to {}", name(self.stream.local_addr()), name(self.stream.peer_addr()))
    }

    /// This rank's address.
    pub fn own_ip(&self) -> Option<std::net::IpAddr> {
        self.stream.local_addr().ok().map(|at| at.ip())
    }

    /// See [`far::is_far`].
    pub fn is_far(&self) -> bool {
        far::is_far(self.stream.as_fd())
    }

    /// See [`far::streams`].
    pub fn streams(&self, far: bool, world: usize) -> u8 {
        far::streams(self.stream.as_fd(), far, world)
    }

    /// See [`far::prepare`].
    pub fn prepare(&self, far: bool, several: bool) -> bool {
        far::prepare(self.stream.as_fd(), far, several)
    }

    /// Both directions of the finished connection. `summed`: frames carry checksums, unless they are encrypted.
    pub fn split(self, summed: bool) -> trigram_core::Result<(Box<dyn Sender>, Box<dyn Receiver>)> {
        let io = |e: Error| trigram_core::Error::io("setting up a TCP connection", e);
        let stream = self.stream.into_std().map_err(io)?;
        tcp::keep_alive(&stream)?;
        match self.tls {
            Some(session) => tls::split(stream, *session),
            None => tcp::split(stream, summed),
        }
    }
}

/// A tokio socket as rustls reads and writes one.
struct Raw<'a>(&'a TcpStream);

impl std::io::Read for Raw<'_> {
    fn read(&mut self, into: &mut [u8]) -> Result<usize> {
        self.0.try_read(into)
    }
}

impl std::io::Write for Raw<'_> {
    fn write(&mut self, bytes: &[u8]) -> Result<usize> {
        self.0.try_write(bytes)
    }

    fn flush(&mut self) -> Result<()> {
        Ok(())
    }
}
