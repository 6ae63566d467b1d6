//! The daemon's settings: a file, and flags that win over it.
//!
//! Every key of the file is a field of [`Config`] (the secret by the file that holds it), and every one but the quotas is a
//! flag too. The documented list is `examples/transferd.toml`; a test keeps the two alike.

use std::path::{Path, PathBuf};

use serde::Deserialize;
use transfer::config::{Config, parse_bytes, read_session_key};
use transfer::error::Error;
use transfer::keys::Key;
use transfer::pool::account::Quota;

/// All keys of the file.
const KEYS: [&str; 16] = [
    "node",
    "dram_bytes",
    "listen",
    "advertise",
    "transport",
    "socket",
    "conductor",
    "peers",
    "secret_file",
    "tls",
    "http",
    "ssd_dirs",
    "ssd_bytes",
    "drain_seconds",
    "log_json",
    "quota",
];

/// Longest file that is read: a hundred times what all keys take.
const FILE_LIMIT: u64 = 1 << 20;

/// The file, and what wins over it.
#[derive(clap::Args, Debug, Default)]
pub struct Flags {
    /// TOML file with node, dram_bytes, listen, socket, secret_file and all the other flags below, as keys
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Id of this node, unique in the cluster
    #[arg(long)]
    node: Option<String>,
    /// Size of the arena, such as 2GiB
    #[arg(long, value_name = "SIZE")]
    dram_bytes: Option<String>,
    /// Where peers connect; port 0: any free one
    #[arg(long, value_name = "HOST:PORT")]
    listen: Option<String>,
    /// What peers dial, where it is not the same as --listen
    #[arg(long, value_name = "HOST:PORT")]
    advertise: Option<String>,
    /// How blocks travel to peers: auto, shm, rdma or tcp
    #[arg(long, value_name = "NAME")]
    transport: Option<String>,
    /// Unix socket for local workers and for the commands that look at this daemon
    #[arg(long, value_name = "PATH")]
    socket: Option<PathBuf>,
    /// The conductor's endpoint for daemons
    #[arg(long, value_name = "HOST:PORT")]
    conductor: Option<String>,
    /// The other daemons that share objects with this one; a conductor names them by itself
    #[arg(long, value_name = "HOST:PORT,...", value_delimiter = ',')]
    peers: Vec<String>,
    /// The cluster's secret: 64 hex digits or raw bytes, readable by its owner only
    #[arg(long, value_name = "FILE")]
    secret_file: Option<PathBuf>,
    /// Encrypt what travels by TCP (TLS 1.3): all daemons and the conductor, or none
    #[arg(long)]
    tls: bool,
    /// Where /metrics and /health are served over plain HTTP; nowhere, if not given. Beyond loopback they ask for the key that
    /// `transferd watch-key` prints
    #[arg(long, value_name = "HOST:PORT")]
    http: Option<String>,
    /// Directory that keeps blocks, one for each device; may be given several times
    #[arg(long = "ssd-dir", value_name = "DIRECTORY")]
    ssd_dirs: Vec<PathBuf>,
    /// What these directories may take together, such as 100GiB
    #[arg(long, value_name = "SIZE")]
    ssd_bytes: Option<String>,
    /// How long SIGTERM waits until nothing is held [default: 25]
    #[arg(long, value_name = "N")]
    drain_seconds: Option<u64>,
    /// Log one JSON object a line
    #[arg(long)]
    log_json: bool,
}

/// The file. Unknown keys have been refused before.
#[derive(Deserialize, Debug, Default)]
struct File {
    node: Option<String>,
    dram_bytes: Option<Size>,
    listen: Option<String>,
    advertise: Option<String>,
    transport: Option<String>,
    socket: Option<PathBuf>,
    conductor: Option<String>,
    #[serde(default)]
    peers: Vec<String>,
    secret_file: Option<PathBuf>,
    #[serde(default)]
    tls: bool,
    http: Option<String>,
    #[serde(default)]
    ssd_dirs: Vec<PathBuf>,
    ssd_bytes: Option<Size>,
    drain_seconds: Option<u64>,
    #[serde(default)]
    log_json: bool,
    #[serde(default)]
    quota: Vec<Table>,
}

/// One `[[quota]]`.
#[derive(Deserialize, Debug, Default)]
#[serde(deny_unknown_fields)]
struct Table {
    namespace: Option<Digest>,
    tenant: Option<Digest>,
    dram_bytes: Option<Size>,
    ssd_bytes: Option<Size>,
    share: Option<u32>,
}

impl Table {
    fn quota(&self) -> Result<Quota, Error> {
        let bytes = |size: &Option<Size>| size.as_ref().map(Size::bytes).transpose();
        Ok(Quota {
            namespace: self.namespace.as_ref().map(|digest| digest.0),
            tenant: self.tenant.as_ref().map(|digest| digest.0),
            dram_bytes: bytes(&self.dram_bytes)?,
            ssd_bytes: bytes(&self.ssd_bytes)?,
            share: self.share.unwrap_or(Quota::default().share),
        })
    }
}

/// A namespace or a tenant, as `transferd keys --json` shows them.
#[derive(Debug)]
struct Digest(u64);

impl<'de> Deserialize<'de> for Digest {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        crate::admin::digest(&text).map(Self).map_err(serde::de::Error::custom)
    }
}

#[derive(Deserialize, Debug)]
#[serde(untagged, expecting = "a size: a number of bytes, or a text such as \"2GiB\"")]
enum Size {
    Bytes(u64),
    Text(String),
}

impl Size {
    fn bytes(&self) -> Result<u64, Error> {
        match self {
            Self::Bytes(bytes) => Ok(*bytes),
            Self::Text(text) => parse_bytes(text),
        }
    }
}

impl Flags {
    /// If the log is to be JSON: the node's name, which each of its lines has. What is wrong with the file is said by
    /// `configure`.
    pub fn log_json(&self) -> Option<String> {
        let file = self.config.as_deref().and_then(|path| read(path).ok()).unwrap_or_default();
        (self.log_json || file.log_json).then(|| self.node.clone().or(file.node).unwrap_or_default())
    }

    /// What the daemon is started with.
    ///
    /// # Errors
    /// Give up: a mistake in either, with what to do.
    pub fn configure(&self) -> Result<Config, Error> {
        let file = self.config.as_deref().map(read).transpose()?.unwrap_or_default();
        let missing =
            |key: &str, flag: &str| Error::give_up(format!("no {key}: give {flag}, or {key} in the --config file"));
        let size = |flag: &Option<String>, file: &Option<Size>| match (flag, file) {
            (Some(text), _) => parse_bytes(text).map(Some),
            (None, Some(size)) => size.bytes().map(Some),
            (None, None) => Ok(None),
        };
        let node = self.node.clone().or(file.node).ok_or_else(|| missing("node", "--node"))?;
        let dram_bytes =
            size(&self.dram_bytes, &file.dram_bytes)?.ok_or_else(|| missing("dram_bytes", "--dram-bytes"))?;
        let secret = self.secret_file.clone().or(file.secret_file);
        let default = Config::new(node, dram_bytes);
        let transport = self.transport.as_deref().or(file.transport.as_deref());
        let config = Config {
            listen: self.listen.clone().or(file.listen),
            advertise: self.advertise.clone().or(file.advertise),
            transport: transport.map_or(Ok(default.transport), str::parse)?,
            socket: self.socket.clone().or(file.socket),
            conductor: self.conductor.clone().or(file.conductor),
            peers: if self.peers.is_empty() { file.peers } else { self.peers.clone() },
            session_key: secret.as_deref().map(read_session_key).transpose()?,
            tls: self.tls || file.tls,
            http: self.http.clone().or(file.http),
            ssd_dirs: if self.ssd_dirs.is_empty() { file.ssd_dirs } else { self.ssd_dirs.clone() },
            ssd_bytes: size(&self.ssd_bytes, &file.ssd_bytes)?.unwrap_or(default.ssd_bytes),
            drain_seconds: self.drain_seconds.or(file.drain_seconds).unwrap_or(default.drain_seconds),
            quotas: file.quota.iter().map(Table::quota).collect::<Result<_, _>>()?,
            ..default
        };
        if config.listen.is_none() && config.socket.is_none() {
            return Err(missing("way in: no socket and no listen", "--socket or --listen"));
        }
        Ok(config)
    }
}

/// By which socket, and with which key, a running daemon is spoken to.
///
/// # Errors
/// Give up: neither way leads to a socket.
pub fn way_in(
    config: Option<&Path>,
    socket: Option<&Path>,
    secret_file: Option<&Path>,
) -> Result<(PathBuf, Option<Key>), Error> {
    let file = config.map(read).transpose()?.unwrap_or_default();
    let socket = socket.map(Path::to_path_buf).or(file.socket).ok_or_else(|| match config {
        Some(config) => Error::give_up(format!(
            "{} names no socket: a daemon without one cannot be spoken to; give it one",
            config.display()
        )),
        None => Error::give_up("which daemon? Give --socket PATH, or the --config FILE that it was started with"),
    })?;
    let secret = secret_file.map(Path::to_path_buf).or(file.secret_file);
    Ok((socket, secret.as_deref().map(read_session_key).transpose()?))
}

/// The session key of a cluster: of its secret, or of a daemon's file that names it.
///
/// # Errors
/// Give up: there is none.
pub fn session_key(config: Option<&Path>, secret_file: Option<&Path>) -> Result<Key, Error> {
    let file = config.map(read).transpose()?.unwrap_or_default();
    let secret = secret_file.map(Path::to_path_buf).or(file.secret_file).ok_or_else(|| {
        Error::give_up("of which cluster? Give --secret-file FILE, or the --config FILE of one of its daemons")
    })?;
    read_session_key(&secret)
}

fn read(path: &Path) -> Result<File, Error> {
    let problem = |error: &dyn std::fmt::Display| Error::give_up(format!("{}: {error}", path.display()));
    let metadata = std::fs::metadata(path).map_err(|error| problem(&error))?;
    if metadata.len() > FILE_LIMIT {
        return Err(problem(&"too long for a configuration"));
    }
    let text = std::fs::read_to_string(path).map_err(|error| problem(&error))?;
    parse(&text).map_err(|error| problem(&error))
}

fn parse(text: &str) -> Result<File, String> {
    let table: toml::Table = toml::from_str(text).map_err(|error| error.to_string())?;
    if let Some(unknown) = table.keys().find(|key| !KEYS.contains(&key.as_str())) {
        let nearest = KEYS.iter().min_by_key(|known| distance(unknown, known));
        // A third of it may be wrong: beyond that it is no misspelling, and a guess would mislead.
        let near = nearest.filter(|known| distance(unknown, known) * 3 <= known.len());
        let meant = near.map(|known| format!(" Did you mean {known:?}?")).unwrap_or_default();
        return Err(format!("there is no key {unknown:?}.{meant} The keys are {}", KEYS.join(", ")));
    }
    // Once more from the text, so that what is wrong is shown where it stands.
    toml::from_str(text).map_err(|error| error.to_string())
}

/// Letters to change, to add or to leave out.
fn distance(one: &str, other: &str) -> usize {
    let other: Vec<char> = other.chars().collect();
    let mut row: Vec<usize> = (0..=other.len()).collect();
    for (above, letter) in one.chars().enumerate() {
        let mut corner = above;
        row[0] = above + 1;
        for (index, &wanted) in other.iter().enumerate() {
            let changed = corner + usize::from(letter != wanted);
            corner = row[index + 1];
            row[index + 1] = changed.min(corner + 1).min(row[index] + 1);
        }
    }
    row[other.len()]
}

#[cfg(test)]
mod tests {
    //! Goal: what the file and the flags say arrives; mistakes are named; the documented file is the truth. Method: parse
    //! without starting.
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        flags: Flags,
    }

    fn flags(list: &[&str]) -> Flags {
        Line::try_parse_from(std::iter::once("transferd").chain(list.iter().copied())).expect("good flags").flags
    }

    /// A file of this test's own.
    struct Scratch(PathBuf);

    impl Scratch {
        fn new(name: &str, text: &str) -> Self {
            let path = std::env::temp_dir().join(format!("pyengine-{name}-{}.toml", std::process::id()));
            std::fs::write(&path, text).expect("writable");
            Self(path)
        }

        fn text(&self) -> &str {
            self.0.to_str().expect("a plain path")
        }
    }

    impl Drop for Scratch {
        fn drop(&mut self) {
            let _ = std::fs::remove_file(&self.0);
        }
    }

    #[test]
    fn flags_win_over_the_file() {
        let all = r#"
            node = "n1"
            dram_bytes = "2GiB"
            listen = "127.0.0.1:0"
            advertise = "one:1"
            transport = "tcp"
            socket = "/one/socket"
            conductor = "one:2"
            peers = ["one:3", "one:4"]
            tls = true
            http = "127.0.0.1:1"
            ssd_dirs = ["/one", "/two"]
            ssd_bytes = 5
            drain_seconds = 7
            log_json = true
            [[quota]]
            tenant = "00000000000000ff"
            dram_bytes = "1GiB"
            ssd_bytes = 77
            share = 3
            [[quota]]
            namespace = "1"
        "#;
        let file = Scratch::new("flags", all);
        assert_eq!(flags(&["--config", file.text()]).log_json(), Some("n1".into()));
        assert_eq!(flags(&["--config", file.text(), "--node", "n2"]).log_json(), Some("n2".into()));
        assert_eq!(flags(&["--node", "n3", "--log-json"]).log_json(), Some("n3".into()));
        assert_eq!(flags(&["--node", "n3"]).log_json(), None);
        let config = flags(&["--config", file.text()]).configure().expect("good");
        let first =
            Quota { tenant: Some(255), dram_bytes: Some(1 << 30), ssd_bytes: Some(77), share: 3, namespace: None };
        let quotas = vec![first, Quota { namespace: Some(1), ..Quota::default() }];
        let expected = Config {
            listen: Some("127.0.0.1:0".into()),
            advertise: Some("one:1".into()),
            transport: "tcp".parse().expect("a transport"),
            socket: Some("/one/socket".into()),
            conductor: Some("one:2".into()),
            peers: vec!["one:3".into(), "one:4".into()],
            tls: true,
            http: Some("127.0.0.1:1".into()),
            ssd_dirs: vec!["/one".into(), "/two".into()],
            ssd_bytes: 5,
            drain_seconds: 7,
            quotas: quotas.clone(),
            ..Config::new("n1", 2 << 30)
        };
        assert_eq!(format!("{config:?}"), format!("{expected:?}"));

        let wins = "--node n2 --dram-bytes 1MiB --listen 127.0.0.1:5 --advertise two:1 --transport shm --socket /s \
                    --conductor two:2 --peers two:3,two:4 --http 127.0.0.1:2 --ssd-dir /three --ssd-bytes 1GiB --drain-seconds 0";
        let wins: Vec<&str> = ["--config", file.text()].into_iter().chain(wins.split_whitespace()).collect();
        let config = flags(&wins).configure().expect("good");
        let expected = Config {
            listen: Some("127.0.0.1:5".into()),
            advertise: Some("two:1".into()),
            transport: "shm".parse().expect("a transport"),
            socket: Some("/s".into()),
            conductor: Some("two:2".into()),
            peers: vec!["two:3".into(), "two:4".into()],
            tls: true,
            http: Some("127.0.0.1:2".into()),
            ssd_dirs: vec!["/three".into()],
            ssd_bytes: 1 << 30,
            drain_seconds: 0,
            quotas,
            ..Config::new("n2", 1 << 20)
        };
        assert_eq!(format!("{config:?}"), format!("{expected:?}"));
    }

    #[test]
    fn mistakes_are_named() {
        let refusal = |text: &str| parse(text).expect_err("a mistake");
        let error = refusal("node = \"n1\"\ndram_byte = 5\n");
        assert!(error.contains("\"dram_byte\"") && error.contains("Did you mean \"dram_bytes\"?"), "{error}");
        assert!(refusal("ssd_dir = []").contains("Did you mean \"ssd_dirs\"?"));
        let error = refusal("colour = \"blue\"");
        assert!(!error.contains("mean") && error.contains("secret_file"), "{error}");
        let error = refusal("dram_bytes = \"2GiB\"\nnode = 5\n");
        assert!(error.contains("node = 5") && error.contains("string"), "where it stands: {error}");
        assert!(refusal("dram_bytes = -1").contains("2GiB"));
        let error = refusal("[[quota]]\nbytes = 5\n");
        assert!(error.contains("bytes") && error.contains("dram_bytes"), "{error}");
        assert!(refusal("[[quota]]\ntenant = \"somebody\"\n").contains("16 hex digits"));
        assert!(refusal("[[quota]]\ntenant = 5\n").contains("string"));
        assert!(refusal("[quota]\ntenant = \"5\"\n").contains("sequence"));
        assert!(refusal("node = ").contains("node"));

        let error = flags(&["--node", "n", "--dram-bytes", "much"]).configure().expect_err("no size").message;
        assert!(error.contains("2GiB"), "{error}");
        let error = flags(&["--node", "n"]).configure().expect_err("no size").message;
        assert!(error.contains("--dram-bytes"), "{error}");
        assert!(flags(&["--node", "n", "--dram-bytes", "1MiB"]).configure().is_err(), "no way in");
        let error = flags(&["--config", "/nowhere/x.toml"]).configure().expect_err("no file").message;
        assert!(error.contains("/nowhere/x.toml"), "{error}");
        let given = ["--node", "n", "--dram-bytes", "1MiB", "--socket", "s", "--transport", "carrier-pigeon"];
        assert!(flags(&given).configure().expect_err("no transport").message.contains("carrier-pigeon"));
    }

    #[test]
    fn a_running_daemon_is_found_by_its_file_or_its_socket() {
        let file = Scratch::new("way", "socket = \"/one/socket\"\n");
        let found = |config: Option<&Path>, socket| way_in(config, socket, None);
        assert_eq!(found(Some(&file.0), None).expect("named").0, Path::new("/one/socket"));
        assert_eq!(found(Some(&file.0), Some(Path::new("/s"))).expect("named").0, Path::new("/s"));
        assert!(found(None, None).expect_err("none").message.contains("--socket"));
        let none = Scratch::new("no-way", "node = \"n\"\n");
        assert!(found(Some(&none.0), None).expect_err("none").message.contains("names no socket"));
        let error = way_in(None, Some(Path::new("/s")), Some(Path::new("/nowhere"))).expect_err("no secret").message;
        assert!(error.contains("/nowhere"), "{error}");
    }

    /// The example's text with each `#key = value` of it in force.
    fn in_force(text: &str) -> String {
        let uncommented = |line: &str| {
            let known = |rest: &&str| {
                let key = |key: &&str| rest.starts_with(&format!("{key} = "));
                *rest == "[[quota]]" || KEYS.iter().chain(&["namespace", "tenant", "share"]).any(key)
            };
            line.strip_prefix('#').filter(known).unwrap_or(line).to_owned()
        };
        text.lines().map(uncommented).collect::<Vec<_>>().join("\n")
    }

    #[test]
    fn the_documented_file_has_every_key_and_the_defaults() {
        let text = include_str!("../examples/transferd.toml");
        // As it stands: what has a default has it, and only what must be chosen is chosen.
        let file = Scratch::new("example", text);
        let config = flags(&["--config", file.text()]).configure().expect("good");
        let chosen =
            Config { listen: config.listen.clone(), socket: config.socket.clone(), ..Config::new("node-0", 2 << 30) };
        assert_eq!(format!("{config:?}"), format!("{chosen:?}"));
        config.check().expect("a daemon starts with it");

        let table: toml::Table = toml::from_str(&in_force(text)).expect("TOML");
        let mut named: Vec<&str> = table.keys().map(String::as_str).collect();
        let mut known = KEYS.to_vec();
        named.sort_unstable();
        known.sort_unstable();
        assert_eq!(named, known, "the example names other keys than there are");
        // Every key is explained: a comment stands before it.
        for key in KEYS {
            let at = text.lines().position(|line| line.trim_start_matches('#').starts_with(&format!("{key} = ")));
            let Some(at) = at else {
                assert_eq!(key, "quota", "a table");
                continue;
            };
            let before = text.lines().nth(at - 1).expect("a line before");
            assert!(before.starts_with("# "), "{key} is not explained");
        }
        // Every key is a flag, and every default that the help tells is the default.
        let mut command = <Line as clap::CommandFactory>::command();
        let help = command.render_long_help().to_string();
        for key in KEYS.into_iter().filter(|key| *key != "quota") {
            let flag = if key == "ssd_dirs" { "--ssd-dir".into() } else { format!("--{}", key.replace('_', "-")) };
            assert!(help.contains(&format!("{flag} ")) || help.contains(&format!("{flag}\n")), "{flag}: {help}");
        }
        assert!(help.contains(&format!("[default: {}]", transfer::config::DRAIN_SECONDS)), "{help}");
    }
}
