//! TLS 1.3 under a session: what makes a TCP connection unreadable to whoever sees it pass.
//!
//! Nobody manages certificates: each process makes a key for itself when it first needs one (a raw public key, RFC
//! 7250), and no side asks whose the other's is. Who is who is proven above, by the session, whose proofs are bound to
//! this very channel ([`Tls::exporter`]): somebody in the middle who ends TLS on both sides has two channels with
//! different exporters, and what was proven on one is worth nothing on the other. Where the cluster has no secret, TLS
//! protects from listeners only.
//!
//! ```text
//! send:    memory --- encrypted, 128 KiB at a time ---> records --- sendmsg ---> kernel
//! receive: kernel --- recvmsg, 128 KiB at a time ---> records --- decrypted ---> memory
//! ```
//!
//! Both have the manners of a non-blocking socket, so that lanes need not know:
//! * Bytes count as sent when the kernel has their records. Until then the socket is full; the same bytes are offered
//!   again, and are not encrypted again.
//! * Fewer bytes than there was room for: the socket was empty, and nothing is left here that could be decrypted.

use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::net::{IpAddr, Ipv4Addr, TcpStream};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use nix::poll::PollFlags;
use nix::sys::socket::{MsgFlags, recv, sendmsg};
use ring::rand::SystemRandom;
use ring::signature::Ed25519KeyPair;
use rustls::client::Resumption;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::ring as provider;
use rustls::crypto::{CryptoProvider, WebPkiSupportedAlgorithms, verify_tls13_signature_with_raw_key};
use rustls::pki_types::{
    CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer, ServerName, SubjectPublicKeyInfoDer, UnixTime,
};
use rustls::server::AlwaysResolvesServerRawPublicKeys;
use rustls::sign::CertifiedKey;
use rustls::{
    ClientConfig, ClientConnection, Connection, DigitallySignedStruct, ServerConfig, ServerConnection, SignatureScheme,
};

use crate::error::Error;
use crate::wire::{self, WireError};

/// Bytes that are encrypted, or taken from the socket, at once: they are still in the second-level cache when the
/// kernel, or the cipher, reads them. Each connection holds about as much each way.
const CHUNK_BYTES: usize = 128 << 10;

/// Which end of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// It has dialled.
    Dialler,
    /// It has accepted.
    Acceptor,
}

/// What the handshake waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shaken {
    /// Nothing: the channel stands.
    Done,
    /// The socket, to be readable or writable.
    Waits(PollFlags),
}

/// One side's TLS state of one connection. The socket is lent for each call, always the same one.
#[derive(Debug)]
pub struct Tls {
    connection: Connection,
    /// What has come and is not decrypted: `from..to`.
    incoming: Box<[u8]>,
    from: usize,
    to: usize,
    /// Bytes that are encrypted, but whose records the kernel has not wholly.
    held: usize,
    /// The other side sends no more.
    ended: bool,
    /// Nothing has come yet.
    fresh: bool,
}

impl Tls {
    /// Nothing is sent yet.
    ///
    /// # Errors
    /// Retry: this process could make no key.
    pub fn new(side: Side) -> Result<Self, Error> {
        let Identity { client, server } = identity()?;
        let connection = match side {
            // A name that says nothing: it is neither sent nor checked.
            Side::Dialler => ClientConnection::new(client.clone(), ServerName::from(IpAddr::from(Ipv4Addr::LOCALHOST)))
                .map(Connection::from),
            Side::Acceptor => ServerConnection::new(server.clone()).map(Connection::from),
        };
        let mut connection = connection.map_err(|error| Error::bug(format!("TLS: {error}")))?;
        connection.set_buffer_limit(Some(CHUNK_BYTES));
        let incoming = vec![0; CHUNK_BYTES].into_boxed_slice();
        Ok(Self { connection, incoming, from: 0, to: 0, held: 0, ended: false, fresh: true })
    }

    /// Does what the handshake can do now.
    ///
    /// # Errors
    /// [`WireError::Clear`] within: the other side speaks no TLS. Else the connection is over.
    pub fn shake(&mut self, socket: BorrowedFd<'_>) -> io::Result<Shaken> {
        loop {
            if !self.flush(socket)? {
                return Ok(Shaken::Waits(PollFlags::POLLOUT));
            }
            if !self.connection.is_handshaking() {
                return Ok(Shaken::Done);
            }
            if self.from == self.to {
                match self.fill(socket)? {
                    None => return Ok(Shaken::Waits(PollFlags::POLLIN)),
                    Some(0) => return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the other side hung up")),
                    Some(_) => {}
                }
                if std::mem::take(&mut self.fresh) && wire::begins(&self.incoming[..self.to]) {
                    return Err(io::Error::other(WireError::Clear));
                }
            }
            if let Err(error) = self.decrypt() {
                // The alert says why, if the socket takes it.
                let _ = self.flush(socket);
                return Err(error);
            }
        }
    }

    /// 32 bytes that both ends of this channel know, and that no other channel has (RFC 9266, tls-exporter). Only once
    /// the handshake is done.
    ///
    /// # Errors
    /// Bug: it is not.
    pub fn exporter(&self) -> Result<[u8; 32], Error> {
        self.connection
            .export_keying_material([0; 32], b"EXPORTER-Channel-Binding", Some(b""))
            .map_err(|error| Error::bug(format!("TLS: {error}")))
    }

    /// Fills the memory with what has come; `None`: nothing is there now; 0: the other side sends no more.
    ///
    /// # Errors
    /// The connection is over.
    pub fn receive(&mut self, socket: BorrowedFd<'_>, into: &mut [IoSliceMut<'_>]) -> io::Result<Option<usize>> {
        let mut got = 0;
        let mut dry = false;
        'memory: for slice in into {
            let mut at = 0;
            while at < slice.len() {
                match self.connection.reader().read(&mut slice[at..]) {
                    Ok(0) => self.ended = true,
                    Ok(bytes) => {
                        (at, got) = (at + bytes, got + bytes);
                        continue;
                    }
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                    Err(error) => return Err(error),
                }
                if self.from == self.to {
                    if self.ended || dry {
                        break 'memory;
                    }
                    match self.fill(socket) {
                        Ok(Some(bytes)) => {
                            self.ended = bytes == 0;
                            // Less than there was room for: the next call would only say that there is no more.
                            dry = bytes < CHUNK_BYTES;
                        }
                        Ok(None) => break 'memory,
                        // What has come before is delivered first; the socket says it again.
                        Err(_) if got > 0 => break 'memory,
                        Err(error) => return Err(error),
                    }
                } else if self.ended {
                    // Nothing is believed behind the end.
                    self.from = self.to;
                } else {
                    self.decrypt()?;
                }
            }
        }
        Ok((got > 0 || self.ended).then_some(got))
    }

    /// Sends the memory; `None`: the socket takes nothing now. What was not reported as sent must be offered again,
    /// first.
    ///
    /// # Errors
    /// The connection is over.
    pub fn send(&mut self, socket: BorrowedFd<'_>, from: &[IoSlice<'_>]) -> io::Result<Option<usize>> {
        let offered: usize = from.iter().map(|slice| slice.len()).sum();
        debug_assert!(self.held <= offered, "{} bytes were encrypted, {offered} are offered again", self.held);
        let mut sent = 0;
        loop {
            if !self.flush(socket)? {
                return Ok((sent > 0).then_some(sent));
            }
            sent += std::mem::take(&mut self.held);
            if sent >= offered {
                return Ok(Some(offered));
            }
            self.held = self.encrypt(from, sent)?;
        }
    }

    /// Says that no more is sent from here, if the socket takes it.
    pub fn close(&mut self, socket: BorrowedFd<'_>) {
        self.connection.send_close_notify();
        // If it is not taken, the end of the connection says it as well: sessions and frames have ends of their own.
        let _ = self.flush(socket);
    }

    /// True if `receive` has something though the socket may have nothing.
    pub fn has_rest(&mut self) -> bool {
        self.from < self.to
            || self.connection.process_new_packets().is_ok_and(|state| state.plaintext_bytes_to_read() > 0)
    }

    /// Takes records from the socket. 0: its end.
    fn fill(&mut self, socket: BorrowedFd<'_>) -> io::Result<Option<usize>> {
        let Some(bytes) = once(|| Ok(recv(socket.as_raw_fd(), &mut self.incoming, MsgFlags::MSG_DONTWAIT)?))? else {
            return Ok(None);
        };
        (self.from, self.to) = (0, bytes);
        Ok(Some(bytes))
    }

    /// Decrypts some of what has come; the reader has it then.
    fn decrypt(&mut self) -> io::Result<()> {
        let taken = self.connection.read_tls(&mut &self.incoming[self.from..self.to])?;
        if taken == 0 {
            self.ended = true;
        }
        self.from += taken;
        self.connection.process_new_packets().map(drop).map_err(broken)
    }

    /// Encrypts some of the memory, from its byte `skip` on; returns how much.
    fn encrypt(&mut self, from: &[IoSlice<'_>], mut skip: usize) -> io::Result<usize> {
        let mut rest = Vec::with_capacity(from.len());
        for slice in from {
            let cut = skip.min(slice.len());
            skip -= cut;
            if cut < slice.len() {
                rest.push(IoSlice::new(&slice[cut..]));
            }
        }
        self.connection.writer().write_vectored(&rest)
    }

    /// Gives the kernel the records that are ready. False: it does not take all of them.
    fn flush(&mut self, socket: BorrowedFd<'_>) -> io::Result<bool> {
        while self.connection.wants_write() {
            if once(|| self.connection.write_tls(&mut Pipe(socket)))?.is_none() {
                return Ok(false);
            }
        }
        Ok(true)
    }
}

/// A TCP socket with its TLS. Whoever uses it has it to himself anyway; the mutex only says so.
#[derive(Debug)]
pub struct Encrypted {
    pub(crate) socket: TcpStream,
    tls: Mutex<Tls>,
}

impl Encrypted {
    /// Nothing is sent yet.
    ///
    /// # Errors
    /// Retry: this process could make no key.
    pub fn new(socket: TcpStream, side: Side) -> Result<Self, Error> {
        Ok(Self { socket, tls: Mutex::new(Tls::new(side)?) })
    }

    /// The socket, and what stands between it and the bytes.
    pub fn parts(&self) -> (BorrowedFd<'_>, MutexGuard<'_, Tls>) {
        // After a panic within it the other side can read no record; nothing false comes out.
        (self.socket.as_fd(), self.tls.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// A socket as rustls wants it.
struct Pipe<'a>(BorrowedFd<'a>);

impl Write for Pipe<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.write_vectored(&[IoSlice::new(bytes)])
    }

    fn write_vectored(&mut self, slices: &[IoSlice<'_>]) -> io::Result<usize> {
        let flags = MsgFlags::MSG_NOSIGNAL | MsgFlags::MSG_DONTWAIT;
        Ok(sendmsg::<()>(self.0.as_raw_fd(), slices, &[], flags, None)?)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Makes a call until no signal interrupts it; `None`: the socket cannot now.
fn once(mut call: impl FnMut() -> io::Result<usize>) -> io::Result<Option<usize>> {
    loop {
        match call() {
            Ok(bytes) => return Ok(Some(bytes)),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(None),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
}

fn broken(error: rustls::Error) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("TLS: {error}"))
}

/// This process's key, as each side of a connection uses it.
struct Identity {
    client: Arc<ClientConfig>,
    server: Arc<ServerConfig>,
}

/// Made at the first use.
fn identity() -> Result<&'static Identity, Error> {
    static IDENTITY: OnceLock<Result<Identity, String>> = OnceLock::new();
    IDENTITY
        .get_or_init(|| make().map_err(|error| error.to_string()))
        .as_ref()
        .map_err(|error| Error::retry(format!("TLS cannot begin: {error}")))
}

fn make() -> Result<Identity, rustls::Error> {
    let provider = CryptoProvider {
        // Both sides are of this engine. The second is for processors without instructions for AES.
        cipher_suites: vec![
            provider::cipher_suite::TLS13_AES_128_GCM_SHA256,
            provider::cipher_suite::TLS13_CHACHA20_POLY1305_SHA256,
        ],
        kx_groups: vec![provider::kx_group::X25519],
        ..provider::default_provider()
    };
    let key = Ed25519KeyPair::generate_pkcs8(&SystemRandom::new())
        .map_err(|_| rustls::Error::General("no random numbers".into()))?;
    let key = PrivateKeyDer::from(PrivatePkcs8KeyDer::from(key.as_ref().to_vec()));
    let key = provider.key_provider.load_private_key(key)?;
    let public = key.public_key().ok_or_else(|| rustls::Error::General("a key without its public half".into()))?;
    let public = CertificateDer::from(public.as_ref().to_vec());
    let own = AlwaysResolvesServerRawPublicKeys::new(Arc::new(CertifiedKey::new(vec![public], key)));

    let algorithms = provider.signature_verification_algorithms;
    let provider = Arc::new(provider);
    let versions = &[&rustls::version::TLS13];
    let mut server = ServerConfig::builder_with_provider(provider.clone())
        .with_protocol_versions(versions)?
        .with_no_client_auth()
        .with_cert_resolver(Arc::new(own));
    // Nothing is resumed: connections last, and a session must be proven anyway.
    server.send_tls13_tickets = 0;
    let mut client = ClientConfig::builder_with_provider(provider)
        .with_protocol_versions(versions)?
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(AnyKey(algorithms)))
        .with_no_client_auth();
    client.resumption = Resumption::disabled();
    client.enable_sni = false;
    Ok(Identity { client: Arc::new(client), server: Arc::new(server) })
}

/// Believes every key that signs; the session proves who has it.
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
        _certificate: &CertificateDer<'_>,
        _signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Err(rustls::Error::General("only TLS 1.3 is spoken here".into()))
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        let key = SubjectPublicKeyInfoDer::from(certificate.as_ref());
        verify_tls13_signature_with_raw_key(message, &key, signature, &self.0)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        vec![SignatureScheme::ED25519]
    }

    fn requires_raw_public_keys(&self) -> bool {
        true
    }
}

#[cfg(test)]
mod tests {
    //! Goal: the manners of a socket (top), whatever the sizes, and whatever TLS says in between. Method: two sides
    //! over a socket pair, driven by hand.
    use std::os::unix::net::UnixStream;

    use super::*;

    struct End(UnixStream, Tls);

    impl End {
        fn send(&mut self, bytes: &[u8]) -> Option<usize> {
            // In two pieces, one of them odd.
            let (left, right) = bytes.split_at(bytes.len() / 3);
            self.1.send(self.0.as_fd(), &[IoSlice::new(left), IoSlice::new(right)]).expect("it stands")
        }

        fn receive(&mut self, bytes: &mut [u8]) -> Option<usize> {
            let (left, right) = bytes.split_at_mut(bytes.len() / 3);
            self.1.receive(self.0.as_fd(), &mut [IoSliceMut::new(left), IoSliceMut::new(right)]).expect("it stands")
        }
    }

    fn pair() -> (End, End) {
        let (left, right) = UnixStream::pair().expect("a socket pair");
        let mut ends = [(left, Side::Dialler), (right, Side::Acceptor)]
            .map(|(socket, side)| End(socket, Tls::new(side).expect("a key")));
        for round in 0.. {
            let shaken = ends.each_mut().map(|end| end.1.shake(end.0.as_fd()).expect("no stranger"));
            if shaken == [Shaken::Done; 2] {
                break;
            }
            assert!(round < 10, "{shaken:?}");
        }
        let [left, right] = ends;
        (left, right)
    }

    fn noise(bytes: usize) -> Vec<u8> {
        (0..bytes as u64).map(|i| (i.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 40) as u8).collect()
    }

    #[test]
    fn both_ends_know_what_no_other_channel_has() {
        let ((left, right), (other, _)) = (pair(), pair());
        let exporter = left.1.exporter().expect("it stands");
        assert_eq!(right.1.exporter(), Ok(exporter));
        assert_ne!(other.1.exporter(), Ok(exporter));
        assert!(Tls::new(Side::Dialler).expect("a key").exporter().is_err(), "before the handshake");
    }

    #[test]
    fn what_is_sent_is_taken_by_the_kernel_and_arrives_once() {
        let (mut left, mut right) = pair();
        let bytes = noise(5_000_001);
        let (mut sent, mut got) = (0, Vec::<u8>::new());
        let mut buffer = vec![0; 70_001];
        let mut full = 0;
        while got.len() < bytes.len() {
            while sent < bytes.len() {
                let Some(more) = left.send(&bytes[sent..]) else { break };
                sent += more;
            }
            full += usize::from(left.1.held > 0);
            assert!(sent == bytes.len() || left.1.connection.wants_write(), "the socket counts as full, and is not");
            assert!(sent < bytes.len() || !left.1.connection.wants_write(), "all counts as sent, and is not");
            while let Some(more) = right.receive(&mut buffer) {
                got.extend(&buffer[..more]);
                assert!(more == buffer.len() || !right.1.has_rest(), "something is left, and nobody is told");
            }
        }
        assert!(got == bytes && full > 0, "{full} times full");
    }

    #[test]
    fn bytes_that_are_offered_again_were_encrypted_already() {
        let (mut left, mut right) = pair();
        let (bytes, mut sent) = (vec![1; 4 << 20], 0);
        while let Some(more) = left.send(&bytes[sent..]) {
            sent += more;
        }
        let held = left.1.held;
        assert!(held > 0 && sent + held < bytes.len());
        // What is not encrypted yet is looked at only when it is.
        let changed = vec![2; bytes.len()];
        let (mut got, mut buffer) = (Vec::<u8>::new(), vec![0; 100_000]);
        while got.len() < bytes.len() {
            while let Some(more) = right.receive(&mut buffer) {
                got.extend(&buffer[..more]);
            }
            while sent < bytes.len() {
                let Some(more) = left.send(&changed[sent..]) else { break };
                sent += more;
            }
        }
        let ones = got.iter().take_while(|byte| **byte == 1).count();
        assert!(got[ones..].iter().all(|byte| *byte == 2) && got.len() == bytes.len() && ones >= held);
    }

    #[test]
    fn new_keys_and_the_end_are_understood() {
        let (mut left, mut right) = pair();
        let mut buffer = [0; 100];
        for round in 0..3 {
            left.1.connection.refresh_traffic_keys().expect("TLS 1.3");
            assert_eq!(left.send(&[round; 10]), Some(10));
            assert_eq!(right.receive(&mut buffer), Some(10));
            assert_eq!((right.send(&[round; 7]), left.receive(&mut buffer)), (Some(7), Some(7)));
            assert_eq!(buffer[..7], [round; 7]);
        }
        assert_eq!(left.receive(&mut buffer), None);
        right.send(b"last");
        right.1.close(right.0.as_fd());
        assert_eq!((left.receive(&mut buffer), left.receive(&mut buffer)), (Some(4), Some(0)));
        drop(left);
        assert_eq!(right.receive(&mut buffer), Some(0), "the end without TLS's is one too");
    }

    #[test]
    fn a_flipped_bit_ends_the_channel() {
        let (mut left, right) = pair();
        left.send(&[7; 1000]);
        let mut record = [0; 2000];
        let bytes = (&right.0).read(&mut record).expect("sent");
        record[bytes / 2] ^= 1;
        let (near, mut far) = UnixStream::pair().expect("a socket pair");
        far.write_all(&record[..bytes]).expect("room");
        let mut right = End(near, right.1);
        let ended = right.1.receive(right.0.as_fd(), &mut [IoSliceMut::new(&mut [0; 1000])]);
        assert_eq!(ended.expect_err("it was altered").kind(), io::ErrorKind::InvalidData);
    }
}
