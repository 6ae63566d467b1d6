//! What a daemon is told at its start, checked before anything is opened.

use std::fmt;
use std::net::{IpAddr, SocketAddr, ToSocketAddrs};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use crate::error::Error;
use crate::keys::{Key, derive_key};
use crate::memory::available_memory;
use crate::mover::Via;
use crate::pool::account::{Quota, check_quotas};
use crate::types::Kind;

/// Longest path of a unix socket: `sun_path` less its final zero.
const SOCKET_PATH_LIMIT: usize = 107;
/// Longest node id, in bytes.
pub const NODE_LIMIT: usize = 64;
/// Most daemons that share objects.
const PEERS_LIMIT: usize = 512;
/// Shortest secret that is worth the name, in bytes.
const SECRET_MINIMUM: usize = 16;
/// Longest secret file that is read.
const SECRET_LIMIT: u64 = 4096;
/// Least bytes of each directory on SSD: four of the smallest segments of 4 MiB. One is being filled and one reclaimed; only
/// the others keep something.
const SSD_MINIMUM: u64 = 16 << 20;
/// How long a stop waits for what is held, if nothing else is said: Kubernetes kills 30 s after its SIGTERM, and behind the
/// wait what lies in DRAM only is written to SSD (3 s at most) and the links are closed.
pub const DRAIN_SECONDS: u64 = 25;
/// Longest wait that can be asked for: a day.
const DRAIN_LIMIT: u64 = 86_400;

/// Settings of one daemon. Its `Debug` does not show the session key.
#[derive(Clone)]
pub struct Config {
    /// The node's id, unique in the cluster: 1 to 64 bytes of letters, digits, `-`, `_` and `.`.
    pub node: String,
    /// Size of the arena.
    pub dram_bytes: u64,
    /// `host:port` for peers; port 0: any. None: no peers.
    pub listen: Option<String>,
    /// `host:port` that peers dial, where it is not what `listen` says.
    pub advertise: Option<String>,
    /// How blocks travel to peers.
    pub transport: Via,
    /// Unix socket for local workers. None: only clients within the process.
    pub socket: Option<PathBuf>,
    /// `host:port` of the conductor's endpoint.
    pub conductor: Option<String>,
    /// `host:port` of the other daemons that share objects with this one. It may name this one too, so that all have the same
    /// list. A conductor names them by itself.
    pub peers: Vec<String>,
    /// Proven by everybody who connects. None: this cluster has no secret, and only loopback is allowed.
    pub session_key: Option<Key>,
    /// What travels by TCP is encrypted (TLS 1.3), to the conductor and between nodes; both sides must want it. Local
    /// workers and shm do not leave the host; rdma cannot be encrypted and is not used then.
    pub tls: bool,
    /// `host:port` for metrics and health checks over plain HTTP; port 0: any. None: no HTTP. Whoever reaches it may read
    /// counters and states, and nothing else.
    pub http: Option<String>,
    /// Directories that keep blocks, one for each device, made if they are missing. None: nothing survives.
    pub ssd_dirs: Vec<PathBuf>,
    /// Bytes that these directories may take together.
    pub ssd_bytes: u64,
    /// How long a stop on a signal waits until nothing is held.
    pub drain_seconds: u64,
    /// What owners may have. None: they are not told apart.
    pub quotas: Vec<Quota>,
}

impl fmt::Debug for Config {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // All by name: a field that is added is not forgotten.
        let Self {
            node,
            dram_bytes,
            listen,
            advertise,
            transport,
            socket,
            conductor,
            peers,
            session_key,
            tls,
            http,
            ssd_dirs,
            ssd_bytes,
            drain_seconds,
            quotas,
        } = self;
        f.debug_struct("Config")
            .field("node", node)
            .field("dram_bytes", dram_bytes)
            .field("listen", listen)
            .field("advertise", advertise)
            .field("transport", transport)
            .field("socket", socket)
            .field("conductor", conductor)
            .field("peers", peers)
            .field("session_key", &session_key.map(|_| "hidden"))
            .field("tls", tls)
            .field("http", http)
            .field("ssd_dirs", ssd_dirs)
            .field("ssd_bytes", ssd_bytes)
            .field("drain_seconds", drain_seconds)
            .field("quotas", quotas)
            .finish()
    }
}

impl Config {
    /// A daemon that nobody can reach, with the default of everything else.
    pub fn new(node: impl Into<String>, dram_bytes: u64) -> Self {
        Self {
            node: node.into(),
            dram_bytes,
            listen: None,
            advertise: None,
            transport: Via::Auto,
            socket: None,
            conductor: None,
            peers: Vec::new(),
            session_key: None,
            tls: false,
            http: None,
            ssd_dirs: Vec::new(),
            ssd_bytes: 0,
            drain_seconds: DRAIN_SECONDS,
            quotas: Vec::new(),
        }
    }

    /// The key of the sessions; without a secret a well-known one, so that the protocol stays the same.
    pub fn key(&self) -> Key {
        self.session_key.unwrap_or_else(open_key)
    }

    /// Finds what cannot work.
    ///
    /// # Errors
    /// Give up, with what to do.
    pub fn check(&self) -> Result<(), Error> {
        let good = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
        if self.node.is_empty() || self.node.len() > NODE_LIMIT || !self.node.chars().all(good) {
            return Err(Error::give_up(format!(
                "node id {:?} is impossible: use 1 to {NODE_LIMIT} letters, digits, '-', '_' or '.'",
                self.node
            )));
        }
        if let Some(available) = available_memory()
            && self.dram_bytes > available
        {
            return Err(Error::give_up(format!(
                "dram_bytes is {}, but this machine has {available} bytes of memory available: lower it",
                self.dram_bytes
            )));
        }
        if self.tls {
            encrypts(self.transport)?;
        }
        if let Some(listen) = &self.listen {
            let addresses = resolve(listen)?;
            if self.session_key.is_none() && !addresses.iter().all(|address| address.ip().is_loopback()) {
                return Err(Error::give_up(format!(
                    "listening at {listen} with no secret would let anybody in: give a secret file, or listen at 127.0.0.1"
                )));
            }
            if self.advertise.is_none() && addresses.iter().any(|address| unspecified(address.ip())) {
                return Err(Error::give_up(format!(
                    "peers cannot dial {listen}: listen at one address of this machine, or say with advertise what they dial"
                )));
            }
        }
        for (name, address) in [("advertise", &self.advertise), ("conductor", &self.conductor)] {
            if let Some(address) = address
                && !is_address(address)
            {
                return Err(Error::give_up(format!("{name} {address:?} is not host:port")));
            }
        }
        self.check_peers()?;
        if let Some(socket) = &self.socket {
            let length = socket.as_os_str().len();
            if length > SOCKET_PATH_LIMIT {
                return Err(Error::give_up(format!(
                    "the socket path {} has {length} bytes, at most {SOCKET_PATH_LIMIT} are possible: use a shorter directory",
                    socket.display()
                )));
            }
        }
        if let Some(http) = &self.http {
            let beyond = !resolve(http)?.iter().all(|address| address.ip().is_loopback());
            if beyond && self.session_key.is_none() {
                return Err(Error::give_up(format!(
                    "http at {http} with no secret would show anybody what is here: give a secret file, or use 127.0.0.1"
                )));
            }
        }
        if self.drain_seconds > DRAIN_LIMIT {
            return Err(Error::give_up(format!(
                "drain_seconds is {}, and at most a day ({DRAIN_LIMIT}) can be waited: lower it",
                self.drain_seconds
            )));
        }
        check_quotas(&self.quotas)?;
        if let Some(quota) = self.quotas.iter().find(|quota| quota.ssd_bytes.is_some() && self.ssd_dirs.is_empty()) {
            return Err(Error::give_up(format!(
                "a quota gives {} bytes of SSD, and ssd_dirs is empty: leave its ssd_bytes out, or name directories",
                quota.ssd_bytes.unwrap_or(0)
            )));
        }
        self.check_ssd()
    }

    fn check_peers(&self) -> Result<(), Error> {
        if let Some(wrong) = self.peers.iter().find(|peer| !is_address(peer)) {
            return Err(Error::give_up(format!("peers: {wrong:?} is not host:port")));
        }
        if self.peers.len() > PEERS_LIMIT {
            return Err(Error::give_up(format!(
                "{} peers are listed, at most {PEERS_LIMIT} are possible: each takes a connection and a thread",
                self.peers.len()
            )));
        }
        if !self.peers.is_empty() && self.listen.is_none() {
            return Err(Error::give_up(
                "peers are listed and listen is not: say where they reach this daemon, as blocks are sent by who has them",
            ));
        }
        Ok(())
    }

    fn check_ssd(&self) -> Result<(), Error> {
        let count = self.ssd_dirs.len() as u64;
        match (count, self.ssd_bytes) {
            (0, 0) => return Ok(()),
            (0, bytes) => {
                return Err(Error::give_up(format!(
                    "ssd_bytes is {bytes} and ssd_dirs is empty: say which directories may take them"
                )));
            }
            (_, 0) => {
                return Err(Error::give_up(
                    "ssd_dirs is given and ssd_bytes is not: say how many bytes these directories may take together",
                ));
            }
            (count, bytes) if bytes / count < SSD_MINIMUM => {
                return Err(Error::give_up(format!(
                    "ssd_bytes is {bytes}: give each of the {count} directories at least {SSD_MINIMUM}, or leave SSD out"
                )));
            }
            _ => {}
        }
        for (index, directory) in self.ssd_dirs.iter().enumerate() {
            let refuse = |why: &str| Err(Error::give_up(format!("ssd_dirs: {}: {why}", directory.display())));
            if self.ssd_dirs[..index].contains(directory) {
                return refuse("it is named twice: name each device once");
            }
            // What is missing will be made in the nearest directory above it that is there.
            let there = directory.ancestors().find(|path| path.exists());
            match there {
                Some(path) if path.is_dir() => {}
                Some(path) if path == directory => return refuse("it is no directory: name one, or remove the file"),
                Some(path) => return refuse(&format!("{} is no directory", path.display())),
                // A relative path, of which nothing is there: it is made where the daemon runs.
                None if directory.is_relative() && !directory.as_os_str().is_empty() => {}
                None => return refuse("it is no path"),
            }
        }
        Ok(())
    }
}

fn is_address(address: &str) -> bool {
    address.rsplit_once(':').is_some_and(|(host, port)| !host.is_empty() && port.parse::<u16>().is_ok())
}

/// Refuses, where TLS is on, what it does not protect.
pub fn encrypts(transport: Via) -> Result<(), Error> {
    match transport {
        Via::Only(Kind::Rdma) => Err(Error::give_up(
            "rdma is not encrypted, and TLS is on: use the transport auto or tcp, or start without TLS where the network \
             is trusted",
        )),
        _ => Ok(()),
    }
}

fn unspecified(ip: IpAddr) -> bool {
    ip.is_unspecified()
}

/// The addresses that `host:port` names.
pub fn resolve(address: &str) -> Result<Vec<SocketAddr>, Error> {
    let unknown = |why: String| {
        Error::give_up(format!("{address:?} is no address to listen at ({why}): give host:port, such as 127.0.0.1:0"))
    };
    let found: Vec<SocketAddr> = address.to_socket_addrs().map_err(|error| unknown(error.to_string()))?.collect();
    if found.is_empty() { Err(unknown("unknown host".into())) } else { Ok(found) }
}

/// The session key where there is no secret: known to all, so it proves nothing but the protocol.
pub fn open_key() -> Key {
    blake3::derive_key("pyengine-llm 2026-11 v1 no secret", b"")
}

/// A session key as callers give it: 32 bytes, or none where the cluster has no secret.
pub fn session_key(bytes: &[u8]) -> Result<Option<Key>, Error> {
    match bytes.len() {
        0 => Ok(None),
        32 => {
            let mut key = [0; 32];
            key.copy_from_slice(bytes);
            Ok(Some(key))
        }
        other => Err(Error::bug(format!("a session key has 32 bytes (derive_key), not {other}"))),
    }
}

/// Reads a secret file (64 hex digits, or raw bytes) and derives the session key.
///
/// # Errors
/// Give up: missing, readable by others, or too short.
pub fn read_session_key(path: &Path) -> Result<Key, Error> {
    let problem = |why: &str| Error::give_up(format!("secret file {}: {why}", path.display()));
    let metadata = std::fs::metadata(path).map_err(|error| problem(&error.to_string()))?;
    if metadata.permissions().mode() & 0o077 != 0 {
        return Err(problem("others may read it: chmod 600 it, and think about a new secret"));
    }
    if metadata.size() > SECRET_LIMIT {
        return Err(problem("too long for a secret"));
    }
    let bytes = std::fs::read(path).map_err(|error| problem(&error.to_string()))?;
    let secret = parse_secret(&bytes);
    if secret.len() < SECRET_MINIMUM {
        return Err(problem("shorter than 16 bytes: make one with 32 random bytes"));
    }
    derive_key(&secret, "session")
}

/// 64 hex digits (white space around them allowed) are 32 bytes; anything else is the secret itself.
fn parse_secret(bytes: &[u8]) -> Vec<u8> {
    let trimmed = bytes.trim_ascii();
    let digit = |byte: u8| (byte as char).to_digit(16).map(|digit| digit as u8);
    if trimmed.len() == 64
        && let Some(digits) = trimmed.iter().map(|&byte| digit(byte)).collect::<Option<Vec<u8>>>()
    {
        return digits.chunks_exact(2).map(|pair| pair[0] << 4 | pair[1]).collect();
    }
    bytes.to_vec()
}

/// A size as people write it: `1073741824`, `2GiB`, `512 MiB`, `64KB`.
pub fn parse_bytes(text: &str) -> Result<u64, Error> {
    let text = text.trim();
    let split = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (number, unit) = text.split_at(split);
    let factor: u64 = match unit.trim().to_ascii_lowercase().as_str() {
        "" | "b" => 1,
        "kib" => 1 << 10,
        "mib" => 1 << 20,
        "gib" => 1 << 30,
        "tib" => 1 << 40,
        "kb" => 1_000,
        "mb" => 1_000_000,
        "gb" => 1_000_000_000,
        "tb" => 1_000_000_000_000,
        _ => 0,
    };
    number
        .parse::<u64>()
        .ok()
        .and_then(|number| number.checked_mul(factor))
        .filter(|_| factor > 0)
        .ok_or_else(|| Error::give_up(format!("{text:?} is no size: write 2GiB, 512MiB or a number of bytes")))
}

#[cfg(test)]
mod tests {
    //! Goal: impossible settings are refused with a sentence that says what to do. Method: one case each.
    use super::*;

    fn config() -> Config {
        Config { listen: Some("127.0.0.1:0".into()), ..Config::new("n0", 1 << 20) }
    }

    fn refusal(change: impl FnOnce(&mut Config)) -> String {
        let mut config = config();
        change(&mut config);
        config.check().expect_err("impossible").message
    }

    #[test]
    fn impossible_settings_are_refused() {
        config().check().expect("possible");
        assert!(refusal(|c| c.node = "a b".into()).contains("letters"));
        assert!(refusal(|c| c.dram_bytes = u64::MAX).contains("lower it"));
        assert!(refusal(|c| c.listen = Some("0.0.0.0:1".into())).contains("secret"));
        let open = |c: &mut Config| (c.listen, c.session_key) = (Some("0.0.0.0:1".into()), Some([1; 32]));
        assert!(refusal(open).contains("advertise"));
        assert!(refusal(|c| c.listen = Some("nonsense".into())).contains("host:port"));
        assert!(refusal(|c| c.conductor = Some("nonsense".into())).contains("host:port"));
        let listed = |peers: &[&str]| peers.iter().map(|peer| (*peer).into()).collect();
        assert!(refusal(|c| (c.peers, c.listen) = (listed(&["nonsense"]), None)).contains("host:port"));
        assert!(refusal(|c| (c.peers, c.listen) = (listed(&["one:1"]), None)).contains("listen"));
        assert!(refusal(|c| (c.tls, c.transport) = (true, Via::Only(Kind::Rdma))).contains("not encrypted"));
        assert!(refusal(|c| c.socket = Some("x".repeat(200).into())).contains("shorter"));
        assert!(refusal(|c| c.http = Some("nonsense".into())).contains("host:port"));
        assert!(refusal(|c| c.drain_seconds = u64::MAX).contains("day"));
    }

    #[test]
    fn the_key_is_not_shown() {
        let shown = |session_key| format!("{:?}", Config { session_key, ..Config::new("n", 1 << 20) });
        assert_eq!(shown(Some([1; 32])), shown(Some([2; 32])));
        assert_ne!(shown(Some([1; 32])), shown(None), "but whether there is one");
        assert!(shown(None).contains(r#"node: "n", dram_bytes: 1048576"#), "{}", shown(None));
    }

    #[test]
    fn impossible_disks_are_refused() {
        let here = std::env::temp_dir();
        let missing = here.join(format!("pyengine-missing-{}/deeper/still", std::process::id()));
        let with = |dirs: &[&Path], bytes| {
            let dirs: Vec<PathBuf> = dirs.iter().map(|&dir| dir.into()).collect();
            Config { ssd_dirs: dirs, ssd_bytes: bytes, ..config() }.check()
        };
        with(&[&here, &missing], 32 << 20).expect("one is there, one can be made");
        with(&[Path::new("here-and-relative")], 32 << 20).expect("it is made where the daemon runs");
        assert!(!missing.exists(), "a check makes nothing");
        let refusal = |dirs: &[&Path], bytes| with(dirs, bytes).expect_err("impossible").message;
        assert!(refusal(&[], 32 << 20).contains("which directories"));
        assert!(refusal(&[&here], 0).contains("how many bytes"));
        assert!(refusal(&[&here], 1 << 20).contains("at least"));
        assert!(refusal(&[&here, &missing], 31 << 20).contains("each of the 2"));
        assert!(refusal(&[&here, &here], 1 << 30).contains("twice"));
        assert!(refusal(&[Path::new("/proc/version")], 1 << 30).contains("no directory"));
        assert!(refusal(&[Path::new("/proc/version/below")], 1 << 30).contains("/proc/version is no directory"));
        assert!(refusal(&[Path::new("")], 1 << 30).contains("no path"));
    }

    #[test]
    fn sizes_and_secrets() {
        assert_eq!(parse_bytes("2GiB"), Ok(2 << 30));
        assert_eq!(parse_bytes(" 512 MiB "), Ok(512 << 20));
        assert_eq!(parse_bytes("10"), Ok(10));
        for wrong in ["", "GiB", "-1", "1.5GiB", "2 parsecs", "99999999999TiB"] {
            assert!(parse_bytes(wrong).is_err(), "{wrong}");
        }
        assert_eq!(parse_secret(format!("{}\n", "0f".repeat(32)).as_bytes()), [15; 32]);
        assert_eq!(parse_secret(b"raw \n"), b"raw \n");
        assert_eq!(session_key(&[]), Ok(None));
        assert!(session_key(&[0; 31]).is_err());
    }
}
