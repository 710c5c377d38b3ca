//! TLS 1.3 sessions of connections between hosts.
//!
//! Each process generates its own key, which identifies nobody: TLS only protects the channel, and the two ranks then
//! prove who they are inside of it, with proofs bound to it ([`crate::security::proofs`]). So there are no
//! certificates, only raw public keys (RFC 7250).

use std::sync::Arc;

use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{WebPkiSupportedAlgorithms, ring as provider};
use rustls::pki_types::{CertificateDer, PrivatePkcs8KeyDer, ServerName, SubjectPublicKeyInfoDer, UnixTime};
use rustls::server::AlwaysResolvesServerRawPublicKeys;
use rustls::sign::CertifiedKey;
use rustls::{
    CipherSuite, ClientConfig, ClientConnection, Connection, DigitallySignedStruct, ServerConfig,
    ServerConnection, SignatureScheme,
};
use trigram_core::{Error, Result};

/// The TLS configuration of this process.
#[derive(Clone, Debug)]
pub struct Tls {
    client: Arc<ClientConfig>,
    server: Arc<ServerConfig>,
}

impl Tls {
    /// With a fresh key, which ends with the process.
    pub fn new() -> Result<Self> {
        let io = |e: rustls::Error| Error::io("preparing TLS", e);
        let key = ring::signature::Ed25519KeyPair::generate_pkcs8(&ring::rand::SystemRandom::new())
            .map_err(|_| Error::io("preparing TLS", "the key could not be generated"))?;
        let key = provider::sign::any_eddsa_type(&PrivatePkcs8KeyDer::from(key.as_ref())).map_err(io)?;
        let Some(public) = key.public_key().map(|k| CertificateDer::from(k.to_vec())) else {
            return Err(Error::io("preparing TLS", "the generated key has no public part"));
        };
        let resolver = AlwaysResolvesServerRawPublicKeys::new(Arc::new(CertifiedKey::new(vec![public], key)));
        let mut provider = provider::default_provider();
        // Ten rounds for a block instead of fourteen: the cipher is most of what TLS costs.
        provider.cipher_suites.sort_by_key(|s| s.suite() != CipherSuite::TLS13_AES_128_GCM_SHA256);
        let provider = Arc::new(provider);
        let verifier = Arc::new(AnyKey(provider.signature_verification_algorithms));
        let only = &[&rustls::version::TLS13];
        let mut client = ClientConfig::builder_with_provider(provider.clone())
            .with_protocol_versions(only)
            .map_err(io)?
            .dangerous()
            .with_custom_certificate_verifier(verifier)
            .with_no_client_auth();
        client.resumption = rustls::client::Resumption::disabled();
        client.enable_sni = false;
        let mut server = ServerConfig::builder_with_provider(provider)
            .with_protocol_versions(only)
            .map_err(io)?
            .with_no_client_auth()
            .with_cert_resolver(Arc::new(resolver));
        // No session is ever resumed.
        server.send_tls13_tickets = 0;
        Ok(Self { client: Arc::new(client), server: Arc::new(server) })
    }

    /// A session of the side that connects.
    pub fn connecting(&self) -> std::io::Result<Connection> {
        let name = ServerName::try_from("trigram").map_err(std::io::Error::other)?;
        let made = ClientConnection::new(self.client.clone(), name).map_err(std::io::Error::other)?;
        Ok(Connection::Client(made))
    }

    /// A session of the side that listens.
    pub fn accepting(&self) -> std::io::Result<Connection> {
        let made = ServerConnection::new(self.server.clone()).map_err(std::io::Error::other)?;
        Ok(Connection::Server(made))
    }
}

/// Accepts any key, but checks the handshake's signature: the peer must own the key it shows.
#[derive(Debug)]
struct AnyKey(WebPkiSupportedAlgorithms);

impl ServerCertVerifier for AnyKey {
    fn verify_server_cert(
        &self,
        _end_entity: &CertificateDer<'_>,
        _intermediates: &[CertificateDer<'_>],
        _server_name: &ServerName<'_>,
        _ocsp_response: &[u8],
        _now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _message: &[u8],
        _cert: &CertificateDer<'_>,
        _dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Err(rustls::Error::General("TLS 1.2 is not supported".into()))
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        key: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        let key = SubjectPublicKeyInfoDer::from(key.as_ref());
        rustls::crypto::verify_tls13_signature_with_raw_key(message, &key, signed, &self.0)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.supported_schemes()
    }

    fn requires_raw_public_keys(&self) -> bool {
        true
    }
}
