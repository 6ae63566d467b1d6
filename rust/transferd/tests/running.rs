//! Goal: a daemon can be run: every command says what is so and what to do, health follows the state, and a signal lets
//! what is held come to its end, but never for ever. Method: the real program in processes of its own, with workers of
//! this process attached to it. Every wait is for an event, with a generous limit that only a failure reaches.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::os::fd::{AsRawFd, IntoRawFd};
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::time::{Duration, Instant};

use nix::fcntl::{FcntlArg, FdFlag, fcntl};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;
use transfer::client::{ClientEvent, PoolClient};
use transfer::config::read_session_key;
use transfer::keys::Key;
use transfer::memory::Runs;
use transfer::messages::{GrantMode, GrantedSlot, LocalEvent, LocalRequest, Refusal};
use transfer::report::{EndpointEvent, ReportEndpoint};
use transfer::types::{BlockKey, Layout, Tag};

const PATIENCE: Duration = Duration::from_secs(60);
const LAYOUT: Layout = Layout { strips: 2, strip_bytes: 512 };
const HEAD: BlockKey = BlockKey([0; 16]);

/// A directory with a secret and a configuration of one test, removed at its end.
struct Place(PathBuf);

impl Place {
    fn new(name: &str, more: &str) -> Self {
        use std::os::unix::fs::PermissionsExt;
        let place = Self(std::env::temp_dir().join(format!("pyengine-running-{name}-{}", std::process::id())));
        std::fs::create_dir_all(&place.0).expect("a temporary directory");
        let [secret, socket] = ["secret", "run/d.sock"].map(|file| place.path(file));
        std::fs::write(&secret, "sixteen bytes, and some more").expect("writable");
        std::fs::set_permissions(&secret, std::fs::Permissions::from_mode(0o600)).expect("our own file");
        let text = format!(
            "node = \"n1\"\ndram_bytes = \"1MiB\"\nlisten = \"127.0.0.1:0\"\nsocket = {socket:?}\nsecret_file = \
             {secret:?}\nhttp = \"127.0.0.1:0\"\n{more}\n"
        );
        std::fs::write(place.path("d.toml"), text).expect("writable");
        place
    }

    fn path(&self, name: &str) -> String {
        self.0.join(name).to_str().expect("a plain path").into()
    }

    fn key(&self) -> Key {
        read_session_key(self.0.join("secret").as_path()).expect("a secret")
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// The daemon of a place, killed with the test.
struct Running<'a> {
    place: &'a Place,
    process: Child,
    ready: Value,
}

impl<'a> Running<'a> {
    fn start(place: &'a Place) -> Self {
        Self::start_with(place, |command| command)
    }

    fn start_with(place: &'a Place, change: impl FnOnce(&mut Command) -> &mut Command) -> Self {
        let (reading, writing) = std::io::pipe().expect("a pipe");
        fcntl(&writing, FcntlArg::F_SETFD(FdFlag::empty())).expect("our own descriptor");
        let mut command = Command::new(env!("CARGO_BIN_EXE_transferd"));
        command.args(["--config", &place.path("d.toml"), "--die-with-parent"]);
        command.args(["--ready-fd", &writing.as_raw_fd().to_string()]).stderr(Stdio::piped());
        change(&mut command);
        let process = command.spawn().expect("starts");
        // The daemon has one of its own now.
        nix::unistd::close(writing.into_raw_fd()).expect("open");
        let mut line = String::new();
        BufReader::new(reading).read_line(&mut line).expect("says when it is ready");
        Self { place, process, ready: serde_json::from_str(&line).expect("JSON") }
    }

    fn attach(&self, incarnation: u64) -> PoolClient {
        let socket = self.place.0.join("run/d.sock");
        PoolClient::connect(&socket, self.place.key(), incarnation, LAYOUT, 0, PATIENCE).expect("attaches")
    }

    fn signal(&self, signal: Signal) {
        kill(Pid::from_raw(self.process.id() as i32), signal).expect("it lives");
    }

    /// Waits for its end; also returns what it has logged.
    fn ended(mut self) -> (ExitStatus, String) {
        let mut log = String::new();
        // The log ends with the process.
        self.process.stderr.take().expect("piped").read_to_string(&mut log).expect("text");
        (self.process.wait().expect("ours"), log)
    }

    /// A command to it.
    fn obey(&self, words: &[&str]) -> Output {
        transferd(&[words, &["--config", &self.place.path("d.toml")]].concat())
    }

    fn json(&self, words: &[&str]) -> Value {
        let output = self.obey(&[words, &["--json"]].concat());
        serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{words:?}: {error}: {:?}", told(&output)))
    }

    /// Status and body.
    fn get(&self, path: &str) -> (u16, String) {
        let mut stream = TcpStream::connect(self.ready["http"].as_str().expect("it has one")).expect("listens");
        stream.set_read_timeout(Some(PATIENCE)).expect("a socket");
        stream.write_all(format!("GET {path} HTTP/1.1\r\n\r\n").as_bytes()).expect("sent");
        let mut answer = String::new();
        stream.read_to_string(&mut answer).expect("answered");
        let status = answer.split(' ').nth(1).and_then(|status| status.parse().ok()).expect("a status");
        (status, answer.split_once("\r\n\r\n").expect("a body").1.to_owned())
    }

    /// Asks until the answer is this one.
    fn becomes(&self, path: &str, wanted: u16) -> String {
        let until = Instant::now() + PATIENCE;
        loop {
            let (status, body) = self.get(path);
            if status == wanted {
                return body;
            }
            assert!(Instant::now() < until, "{path} is {status}, not {wanted}: {body}");
        }
    }

    /// Asks for its health until this check is so; returns what it says, and all of the answer. An engine that is only
    /// too busy to answer in time has no such check.
    fn checked(&self, path: &str, name: &str, ok: bool) -> (String, Value) {
        let until = Instant::now() + PATIENCE;
        loop {
            let (status, body) = self.get(path);
            let body: Value = serde_json::from_str(&body).unwrap_or_else(|error| panic!("{path}: {error}: {body}"));
            let checks = body["checks"].as_array().expect("a list");
            if let Some(found) = checks.iter().find(|check| check["check"] == name && check["ok"] == ok) {
                // All may be well but this one.
                assert!(ok || status == 503, "{path} is {status}: {body}");
                return (found["detail"].as_str().expect("text").into(), body);
            }
            assert!(Instant::now() < until, "{name} is never {ok}: {body}");
        }
    }

    /// Has these blocks, which are there, written to SSD: what comes twice is.
    fn on_ssd(&self, client: &PoolClient, request: u64, numbers: &[u8]) {
        assert!(grant(client, request, numbers, GrantMode::Wait).expect("there").iter().all(|slot| slot.committed));
        client.request(LocalRequest::End { tag: tag(request) }).expect("sent");
        let until = Instant::now() + PATIENCE;
        while self.json(&["status"])["tiers"][1]["blocks"].as_u64() < Some(numbers.len() as u64) {
            assert!(Instant::now() < until, "blocks that came twice are not written");
        }
    }
}

impl Drop for Running<'_> {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn transferd(words: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_transferd")).args(words).output().expect("starts")
}

fn told(output: &Output) -> (Option<i32>, String, String) {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (output.status.code(), text(&output.stdout), text(&output.stderr))
}

fn key(number: u8) -> BlockKey {
    BlockKey([number; 16])
}

fn tag(request: u64) -> Tag {
    Tag { request, attempt: 0, worker: 1 }
}

/// Asks for a grant; its slots, or why not.
fn grant(client: &PoolClient, request: u64, numbers: &[u8], mode: GrantMode) -> Result<Vec<GrantedSlot>, Refusal> {
    let keys = numbers.iter().copied().map(key).collect();
    let (private, parent, position) = (0, HEAD, 0);
    client
        .request(LocalRequest::Grant { tag: tag(request), keys, private, parent, position, mode, tenant: 0 })
        .expect("sent");
    let until = Instant::now() + PATIENCE;
    loop {
        assert!(Instant::now() < until, "no answer to the grant {request}");
        client.wait(Duration::from_millis(200));
        for event in client.events() {
            match event {
                ClientEvent::Event(LocalEvent::Granted { tag: of, slots }) if of == tag(request) => return Ok(slots),
                ClientEvent::Event(LocalEvent::Refused { tag: of, refusal }) if of == tag(request) => {
                    return Err(refusal);
                }
                ClientEvent::Disconnected(why) => panic!("the daemon has ended: {why}"),
                _ => {}
            }
        }
    }
}

/// Blocks that are there and nobody holds; returns their slots.
fn publish(client: &PoolClient, request: u64, numbers: &[u8]) -> Vec<GrantedSlot> {
    let slots = grant(client, request, numbers, GrantMode::Wait).expect("room");
    for (slot, number) in slots.iter().zip(numbers) {
        client.store(slot.slot, Runs::from(0), &[*number; 1024]).expect("in range");
    }
    commit_and_end(client, request, numbers.len());
    slots
}

fn commit_and_end(client: &PoolClient, request: u64, count: usize) {
    let indices = (0..count as u32).collect();
    client.request(LocalRequest::Commit { tag: tag(request), indices }).expect("sent");
    client.request(LocalRequest::End { tag: tag(request) }).expect("sent");
    // The daemon takes one client's requests in their order, so that what is asked after this answer is after them.
    assert!(grant(client, u64::MAX - request, &[], GrantMode::Staging).is_ok());
    client.request(LocalRequest::End { tag: tag(u64::MAX - request) }).expect("sent");
}

#[test]
fn every_command_says_what_is_so() {
    let place = Place::new("commands", "");
    let daemon = Running::start(&place);
    let client = daemon.attach(1);
    let slots = publish(&client, 1, &[0x0a, 0x1b, 0x1c]);
    grant(&client, 2, &[0x1b], GrantMode::Wait).expect("there");

    let status = daemon.json(&["status"]);
    assert_eq!((&status["node"], &status["incarnation"]), (&daemon.ready["node"], &daemon.ready["incarnation"]));
    assert_eq!((&status["tiers"][0]["medium"], &status["tiers"][0]["blocks"]), (&"dram".into(), &3.into()));
    assert_eq!((&status["held"]["grants"], &status["draining"]), (&1.into(), &false.into()));
    let (_, text, _) = told(&daemon.obey(&["status"]));
    let address = daemon.ready["address"].as_str().expect("text");
    for part in ["n1: serving", address, "1 tag, 1 grant", "dram", "2 x 512", "1MiB"] {
        assert!(text.contains(part), "{part:?} is not in {text}");
    }

    let stats = daemon.json(&["stats"]);
    assert_eq!(stats[r#"pyengine_pool_grants{node="n1",state="held"}"#], 1);
    assert_eq!(stats[r#"pyengine_pool_blocks{node="n1",tier="dram",state="cached"}"#], 2);
    let (_, text, _) = told(&daemon.obey(&["stats"]));
    assert!(text.lines().any(|line| line.trim() == r#"1  pyengine_pool_grants{node="n1",state="held"}"#), "{text}");

    // Keys: all, by their beginning, some, by medium; whose they are and who holds them.
    let list = |words: &[&str]| -> Vec<Value> {
        let (code, out, why) = told(&daemon.obey(&[&["keys", "--json"], words].concat()));
        assert_eq!(code, Some(0), "{why}");
        out.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect()
    };
    let names = |lines: &[Value]| -> Vec<String> {
        let mut names: Vec<String> = lines.iter().map(|line| line["key"].as_str().expect("text").into()).collect();
        names.sort_unstable();
        names
    };
    let hex = |byte: &str| byte.repeat(16);
    let all = list(&[]);
    assert_eq!(names(&all), [hex("0a"), hex("1b"), hex("1c")]);
    for line in &all {
        assert_eq!((&line["medium"], &line["bytes"]), (&"dram".into(), &1024.into()));
        assert_eq!(line["held"], line["key"] == hex("1b"));
    }
    let second = all.iter().find(|line| line["position"] == 1).expect("a second block");
    assert_eq!((&second["key"], &second["parent"]), (&hex("1b").into(), &hex("0a").into()));
    assert_eq!(names(&list(&["--prefix", "1"])), [hex("1b"), hex("1c")]);
    assert_eq!(names(&list(&["--prefix", &hex("1c")])), [hex("1c")]);
    assert_eq!(list(&["--limit", "2"]).len(), 2);
    assert_eq!((list(&["--medium", "dram"]).len(), list(&["--medium", "ssd"]).len()), (3, 0));
    let (_, text, _) = told(&daemon.obey(&["keys", "--prefix", "0"]));
    assert!(text.lines().count() == 2 && text.starts_with("key ") && text.contains(&hex("0a")), "{text}");

    // What is rotten is found, once.
    let (code, text, why) = told(&daemon.obey(&["verify"]));
    assert_eq!((code, why.as_str()), (Some(0), ""));
    assert!(text.starts_with("dram: 3 blocks, 3072 bytes read"), "{text}");
    client.arena().corrupt_for_test(slots[2].slot.slot, 1);
    let output = daemon.obey(&["verify", "--json"]);
    let found: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    assert_eq!((&found["dram"]["blocks"], &found["dram"]["bad"]), (&3.into(), &vec![hex("1c")].into()));
    assert_eq!(output.status.code(), Some(1));
    assert!(told(&output).2.contains("memory"), "what to do: {output:?}");
    assert_eq!(daemon.json(&["verify", "--medium", "dram"])["dram"]["blocks"], 2);
    let (code, _, why) = told(&daemon.obey(&["verify", "--medium", "ssd"]));
    assert!(code == Some(1) && why.contains("no SSD"), "{why}");

    // What nobody holds is dropped, and nothing else.
    let (code, text, why) = told(&daemon.obey(&["evict", &hex("0a"), &hex("1b"), &hex("ff")]));
    assert_eq!((code, text.as_str()), (Some(1), "1 dropped, 1 held and kept, 1 not there\n"));
    assert!(why.contains("2 of 3"), "{why}");
    client.request(LocalRequest::End { tag: tag(2) }).expect("sent");
    publish(&client, 3, &[0x2d, 0x2e]);
    assert_eq!(daemon.json(&["evict", "--all"]), serde_json::json!({"dropped": 3, "held": 0, "missing": 0}));
    assert_eq!(list(&[]).len(), 0);

    // An owner's blocks go, those of others stay.
    let (namespaced, socket) = (0xabcu64, place.0.join("run/d.sock"));
    let other = PoolClient::connect(&socket, place.key(), 2, LAYOUT, namespaced, PATIENCE).expect("attaches");
    publish(&other, 10, &[0x41, 0x42]);
    publish(&client, 11, &[0x51]);
    grant(&other, 12, &[0x41], GrantMode::Wait).expect("there");
    assert!(list(&["--prefix", "4"]).iter().all(|line| line["namespace"] == "0000000000000abc"));
    let (code, text, why) = told(&daemon.obey(&["clear", "--namespace", "abc"]));
    assert_eq!((code, text.as_str()), (Some(1), "1 dropped, 1 held and kept, 0 not there\n"));
    assert!(why.contains("ask again"), "{why}");
    drop(other);
    let until = Instant::now() + PATIENCE;
    // The daemon learns of the worker's end by and by.
    while told(&daemon.obey(&["clear", "--namespace", "abc"])).0 != Some(0) {
        assert!(Instant::now() < until, "a dead worker holds a block");
    }
    assert_eq!(names(&list(&[])), [hex("51")]);
    assert_eq!(told(&daemon.obey(&["clear", "--tenant", "0"])).1, "1 dropped, 0 held and kept, 0 not there\n");

    // Draining: what is held is told, and what is then.
    grant(&client, 4, &[0x2f], GrantMode::Wait).expect("room");
    let (code, text, why) = told(&daemon.obey(&["drain", "--within", "0"]));
    assert_eq!((code, text.as_str()), (Some(1), "n1 drains: 1 tag, 1 grant held\n"));
    assert!(why.contains("--cancel"), "{why}");
    assert_eq!(grant(&client, 5, &[0x30], GrantMode::Wait), Err(Refusal::Full));
    assert!(told(&daemon.obey(&["status"])).1.starts_with("n1: draining"));
    commit_and_end(&client, 4, 1);
    let (code, text, _) = told(&daemon.obey(&["drain"]));
    assert_eq!((code, text.as_str()), (Some(0), "n1 is drained: nothing is held, nothing new is taken on\n"));
    assert_eq!(told(&daemon.obey(&["drain", "--cancel"])).1, "n1 takes on work again\n");
    assert!(grant(&client, 6, &[0x30], GrantMode::Wait).is_ok());
}

/// Flips a bit of the block that was written last to one of a directory's segments: none that was removed.
fn rot_a_block(directory: &Path) {
    for file in std::fs::read_dir(directory.join("segments")).expect("a folder") {
        let path = file.expect("a file").path();
        let mut bytes = std::fs::read(&path).expect("readable");
        let number = |at: usize| u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]) as usize;
        // Where the batch's last entry says that its block lies, if it is one.
        let last = |header: usize| header + 48 + 72 * (number(header + 12) - 1);
        let headers = (0..bytes.len()).step_by(4096).rev().filter(|&at| bytes[at..].starts_with(b"pyengBAT"));
        if let Some(entry) = headers.map(last).find(|entry| number(entry + 68) == 0) {
            let block = number(entry + 64) * 4096;
            bytes[block] ^= 1;
            return std::fs::write(&path, bytes).expect("writable");
        }
    }
    panic!("no segment has a block");
}

#[test]
fn what_is_on_ssd_is_seen_survives_and_can_be_dropped() {
    let directory = std::env::temp_dir().join(format!("pyengine-running-ssd-{}/ssd", std::process::id()));
    let place = Place::new("ssd", &format!("ssd_dirs = [{directory:?}]\nssd_bytes = \"64MiB\""));
    let on_ssd = |daemon: &Running<'_>| -> Vec<String> {
        let (code, out, why) = told(&daemon.obey(&["keys", "--medium", "ssd", "--json"]));
        assert_eq!(code, Some(0), "{why}");
        let lines = out.lines().map(|line| serde_json::from_str::<Value>(line).expect("JSON"));
        let mut keys: Vec<String> = lines.map(|line| line["key"].as_str().expect("text").into()).collect();
        keys.sort_unstable();
        keys
    };
    let [first, second, third] = ["0a", "0b", "0c"].map(|byte| byte.repeat(16));
    let daemon = Running::start(&place);
    let client = daemon.attach(1);
    publish(&client, 1, &[0x0a, 0x0b, 0x0c]);
    assert_eq!(daemon.json(&["status"])["tiers"][1]["medium"], "ssd");
    daemon.checked("/health/deep", "ssd", true);
    daemon.becomes("/health/deep", 200);
    // The next life has what is written. (A stop writes all that is not, but in so much time and no more.)
    daemon.on_ssd(&client, 2, &[0x0a, 0x0b, 0x0c]);
    drop(client);
    daemon.signal(Signal::SIGTERM);
    let (status, log) = daemon.ended();
    assert_eq!(status.code(), Some(0), "{log}");
    let daemon = Running::start(&place);
    assert_eq!(on_ssd(&daemon), [first.clone(), second.clone(), third.clone()]);
    let tier = &daemon.json(&["status"])["tiers"][1];
    assert_eq!(tier["blocks"], 3);
    assert!(tier["io"] == "io_uring" || tier["io"] == "threads", "{tier}");
    let clean = serde_json::json!({"ssd": {"blocks": 3, "bytes": 3072, "gone": 0, "failed": 0, "bad": []}});
    assert_eq!(daemon.json(&["verify"]), clean);
    let families = daemon.becomes("/metrics", 200);
    assert!(families.contains("# TYPE pyengine_tier_"), "{families}");
    for line in families.lines().filter_map(|line| line.strip_prefix("# TYPE ")) {
        let name = line.split(' ').next().expect("a name");
        assert!(families.contains(&format!("# HELP {name} ")), "{name} is not explained");
    }
    // What is dropped is gone in the next life too.
    let (code, text, why) = told(&daemon.obey(&["evict", &first]));
    assert_eq!((code, text.as_str()), (Some(0), "1 dropped, 0 held and kept, 0 not there\n"), "{why}");
    daemon.signal(Signal::SIGTERM);
    assert_eq!(daemon.ended().0.code(), Some(0));
    let daemon = Running::start(&place);
    assert_eq!(on_ssd(&daemon).first(), Some(&second));
    // What has rotted there is found though nobody wants it, and is there no more.
    rot_a_block(&directory);
    let (code, text, why) = told(&daemon.obey(&["verify", "--medium", "ssd"]));
    let rotten = text.lines().find_map(|line| line.strip_prefix("ssd: rotten: ")).unwrap_or("none");
    assert!(code == Some(1) && why.contains("test this machine's disks"), "{text}{why}");
    assert_eq!(on_ssd(&daemon), [second, third].into_iter().filter(|key| key != rotten).collect::<Vec<_>>());
    assert_eq!(on_ssd(&daemon).len(), 1, "{text}");
    assert_eq!(told(&daemon.obey(&["clear", "--namespace", "0"])).1, "1 dropped, 0 held and kept, 0 not there\n");
    assert_eq!((on_ssd(&daemon).len(), daemon.json(&["evict", "--all"])["dropped"].as_u64()), (0, Some(0)));
    drop(daemon);
    let _ = std::fs::remove_dir_all(directory.parent().expect("ours"));
}

#[test]
fn a_reader_that_goes_away_is_no_error() {
    let place = Place::new("pipe", "");
    let daemon = Running::start(&place);
    publish(&daemon.attach(1), 1, &[1, 2, 3]);
    for command in ["keys", "status", "stats"] {
        let (reading, writing) = std::io::pipe().expect("a pipe");
        drop(reading);
        let mut obeying = Command::new(env!("CARGO_BIN_EXE_transferd"));
        obeying.args([command, "--config", &place.path("d.toml")]).stdout(writing);
        let (code, _, why) = told(&obeying.output().expect("starts"));
        assert_eq!((code, why.as_str()), (Some(0), ""), "{command}");
    }
}

#[test]
fn mistakes_are_answered_with_what_to_do() {
    let place = Place::new("mistakes", "");
    let nobody = place.path("run/d.sock");
    let file = place.path("d.toml");
    let refused = |code: i32, words: &[&str], hints: &[&str]| {
        let (status, out, why) = told(&transferd(words));
        assert_eq!((status, out.as_str()), (Some(code), ""), "{words:?}: {why}");
        hints.iter().for_each(|hint| assert!(why.contains(hint), "{words:?}: {hint:?} is not in {why}"));
    };
    // No daemon there.
    refused(1, &["status", "--config", &file], &["no daemon listens", &nobody, "start it"]);
    let daemon = Running::start(&place);
    // The wrong secret, and none.
    let other = Place::new("mistakes-other", "");
    std::fs::write(other.0.join("secret"), "another sixteen bytes").expect("writable");
    refused(2, &["status", "--socket", &nobody, "--secret-file", &other.path("secret")], &["secret"]);
    refused(2, &["status", "--socket", &nobody], &["secret"]);
    // No daemon's socket.
    let alien = other.0.join("alien.sock");
    let listener = std::os::unix::net::UnixListener::bind(&alien).expect("binds");
    let greeter = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().expect("somebody comes");
        stream.write_all(b"* OK IMAP4rev1\r\n").expect("sent");
        let _ = stream.read_to_end(&mut Vec::new());
    });
    refused(2, &["status", "--socket", &other.path("alien.sock")], &["alien.sock", "no transferd"]);
    greeter.join().expect("no panic");
    // Arguments.
    refused(2, &["status"], &["--socket", "--config"]);
    refused(2, &["evict", "--config", &file], &["KEY"]);
    refused(2, &["evict", "0a", "--config", &file], &["32 hex digits"]);
    refused(2, &["evict", &"0a".repeat(16), "--all", "--config", &file], &["--all"]);
    refused(2, &["clear", "--config", &file], &["--namespace", "--tenant"]);
    refused(2, &["clear", "--tenant", "xyz", "--config", &file], &["hex"]);
    refused(2, &["clear", "--tenant", "1", "--namespace", "2", "--config", &file], &["--namespace"]);
    refused(2, &["keys", "--prefix", "xyz", "--config", &file], &["hex"]);
    refused(2, &["keys", "--medium", "tape", "--config", &file], &["dram", "ssd"]);
    let whole = "0a".repeat(16);
    refused(2, &["pin", "--ttl", "5", "--config", &file], &["KEY"]);
    refused(2, &["pin", &whole, "--config", &file], &["--ttl"]);
    refused(2, &["pin", &whole, "--ttl", "0", "--config", &file], &["more than 0", "86400"]);
    refused(2, &["pin", &whole, "--ttl", "1e9", "--config", &file], &["86400"]);
    refused(2, &["pin", &whole, "--ttl", "5", "--by", "", "--config", &file], &["no name"]);
    refused(2, &["unpin", "0a", "--config", &file], &["32 hex digits"]);
    refused(2, &["drain", "--within=-5", "--config", &file], &["--within"]);
    refused(2, &["stats", "--config", "/nowhere/d.toml"], &["/nowhere/d.toml"]);
    // A file with mistakes, and a second daemon.
    let broken = Place::new("mistakes-broken", "sd_dirs = []");
    refused(2, &["--config", &broken.path("d.toml")], &["Did you mean \"ssd_dirs\"?"]);
    for (name, quota, hint) in [
        ("share", "[[quota]]\nshare = 0", "share of 0"),
        ("twice", "[[quota]]\ntenant = \"1\"\n[[quota]]\ntenant = \"01\"", "same owners"),
        ("ssd", "[[quota]]\nssd_bytes = 5", "ssd_dirs is empty"),
        ("key", "[[quota]]\nbytes = 5", "dram_bytes"),
    ] {
        let bad = Place::new(&format!("mistakes-quota-{name}"), quota);
        refused(2, &["--config", &bad.path("d.toml"), "--log", "off"], &[hint]);
    }
    let half = Place::new("mistakes-half", "ssd_bytes = \"1GiB\"");
    refused(2, &["--config", &half.path("d.toml"), "--log", "off"], &["which directories"]);
    refused(2, &["--config", &file, "--log", "off"], &["another daemon listens"]);
    let port = daemon.ready["http"].as_str().expect("it has one");
    refused(
        2,
        &["--config", &file, "--socket", &other.path("b.sock"), "--http", port, "--log", "off"],
        &["in use", port],
    );
}

#[test]
fn health_follows_the_state() {
    // A conductor comes, and goes.
    let place = Place::new("health", "");
    let conductor = ReportEndpoint::new("127.0.0.1:0", Some(place.key()), false, 1).expect("listens");
    let address = conductor.address().to_string();
    let daemon = Running::start_with(&place, |command| command.args(["--conductor", &address]));
    let until = Instant::now() + PATIENCE;
    while !conductor.events().iter().any(|event| matches!(event, EndpointEvent::Report(..))) {
        assert!(Instant::now() < until, "the daemon does not report");
        std::thread::yield_now();
    }
    assert_eq!(daemon.checked("/health/deep", "conductor", true).0, format!("connected to {address}"));
    let (dram, body) = daemon.checked("/health/deep", "dram", true);
    assert!(dram.starts_with("good"), "{dram}");
    assert_eq!((&body["node"], &body["ok"]), (&"n1".into(), &true.into()));
    conductor.close();
    assert_eq!(daemon.checked("/health/deep", "conductor", false).0, format!("does not answer at {address}"));
    // Without it the daemon serves as well.
    daemon.becomes("/health/ready", 200);
    assert_eq!(daemon.get("/health/live").0, 200);
    let metrics = daemon.becomes("/metrics", 200);
    assert!(metrics.contains("# TYPE pyengine_pool_evictions_total counter\n"), "{metrics}");
    assert!(metrics.contains("\npyengine_daemon_conductor_connected{node=\"n1\"} 0\n"), "{metrics}");

    let client = daemon.attach(1);
    grant(&client, 1, &[1], GrantMode::Wait).expect("room");
    daemon.signal(Signal::SIGTERM);
    let (draining, body) = daemon.checked("/health/ready", "draining", false);
    assert_eq!(draining, "nothing new is taken on");
    assert_eq!(body["checks"][0]["ok"], true, "the engine: {body}");
    assert_eq!(daemon.get("/health/live").0, 200, "one that drains must not be started again");
}

#[test]
fn a_signal_lets_what_is_held_end() {
    for signal in [Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP] {
        let place = Place::new(&format!("signal-{signal}"), "drain_seconds = 600");
        let daemon = Running::start(&place);
        let client = daemon.attach(1);
        let load = daemon.attach(2);
        let slots = grant(&client, 1, &[1, 2], GrantMode::Wait).expect("room");
        daemon.signal(signal);
        // Another worker goes on asking; sooner or later it is turned away.
        let until = Instant::now() + PATIENCE;
        let refusal = (2..).find_map(|request| {
            assert!(Instant::now() < until, "{signal} changes nothing");
            let outcome = grant(&load, request, &[3], GrantMode::Now);
            load.request(LocalRequest::End { tag: tag(request) }).expect("sent");
            outcome.err()
        });
        assert_eq!(refusal, Some(Refusal::Full));
        // What was granted before is worth what it was, and what is needed to use it is still to be had.
        slots.iter().for_each(|slot| client.store(slot.slot, Runs::from(0), &[7; 1024]).expect("the daemon lives"));
        grant(&client, 1 << 40, &[], GrantMode::Staging).expect("for a push that has begun");
        client.request(LocalRequest::End { tag: tag(1 << 40) }).expect("sent");
        client.request(LocalRequest::Commit { tag: tag(1), indices: vec![0, 1] }).expect("sent");
        client.request(LocalRequest::End { tag: tag(1) }).expect("sent");
        let (status, log) = daemon.ended();
        assert_eq!(status.code(), Some(0), "{log}");
        assert!(log.contains("nothing is held") && log.contains(signal.as_str()), "{log}");
        assert!(!place.0.join("run/d.sock").exists(), "it has ended well");
    }
}

#[test]
fn a_second_signal_and_the_end_of_the_time_cut_it_off() {
    let place = Place::new("second", "drain_seconds = 86400");
    let daemon = Running::start(&place);
    let client = daemon.attach(1);
    grant(&client, 1, &[1], GrantMode::Wait).expect("room");
    daemon.signal(Signal::SIGTERM);
    // Only then the first signal has been taken.
    daemon.checked("/health/ready", "draining", false);
    daemon.signal(Signal::SIGINT);
    let (status, log) = daemon.ended();
    assert_eq!(status.code(), Some(0), "{log}");
    assert!(log.contains("at once on a second signal, SIGINT"), "{log}");

    let place = Place::new("late", "drain_seconds = 0");
    let daemon = Running::start(&place);
    let client = daemon.attach(1);
    grant(&client, 1, &[1], GrantMode::Wait).expect("room");
    daemon.signal(Signal::SIGTERM);
    let (status, log) = daemon.ended();
    assert_eq!(status.code(), Some(0), "{log}");
    assert!(log.contains("with something held"), "{log}");
}

#[test]
fn the_supervisor_is_told() {
    let place = Place::new("supervisor", "");
    let abstract_name = format!("pyengine-supervisor-{}", std::process::id());
    for by_name in [false, true] {
        use std::os::linux::net::SocketAddrExt;
        let path = place.path("notify.sock");
        let (listener, address) = if by_name {
            let address = std::os::unix::net::SocketAddr::from_abstract_name(&abstract_name).expect("short");
            (UnixDatagram::bind_addr(&address), format!("@{abstract_name}"))
        } else {
            (UnixDatagram::bind(&path), path)
        };
        let listener = listener.expect("binds");
        listener.set_read_timeout(Some(PATIENCE)).expect("a socket");
        let next = || {
            let mut buffer = [0; 1024];
            let bytes = listener.recv(&mut buffer).expect("told");
            String::from_utf8_lossy(&buffer[..bytes]).into_owned()
        };
        let daemon = Running::start_with(&place, |command| command.env("NOTIFY_SOCKET", &address));
        assert_eq!(next(), "READY=1\nSTATUS=n1 serves\n");
        daemon.signal(Signal::SIGTERM);
        // 25 s for what is held, 10 s to end.
        assert_eq!(next(), "STOPPING=1\nSTATUS=draining\nEXTEND_TIMEOUT_USEC=35000000\n");
        assert_eq!(daemon.ended().0.code(), Some(0));
    }
    // One that is not there is no reason not to serve.
    let daemon = Running::start_with(&place, |command| command.env("NOTIFY_SOCKET", "/nowhere/at/all"));
    daemon.signal(Signal::SIGTERM);
    let (status, log) = daemon.ended();
    assert!(status.success() && log.contains("/nowhere/at/all"), "{log}");
}

#[test]
fn the_unit_is_one_that_systemd_takes() {
    let unit = include_str!("../examples/transferd.service");
    let ours = env!("CARGO_BIN_EXE_transferd");
    assert!(unit.contains("\nExecStart=/usr/bin/transferd "), "{unit}");
    let place = Place::new("unit", "");
    let path = place.path("transferd.service");
    std::fs::write(&path, unit.replace("/usr/bin/transferd", ours)).expect("writable");
    match Command::new("systemd-analyze").args(["verify", "--man=no", &path]).output() {
        Err(error) => println!("not verified: there is no systemd-analyze here ({error})"),
        Ok(output) => {
            let (code, out, why) = told(&output);
            assert_eq!(code, Some(0), "{out}{why}");
            assert!(!why.contains("transferd.service"), "{why}");
        }
    }
}

#[test]
fn blocks_are_kept_and_owners_have_quotas() {
    let place = Place::new("keeps", "[[quota]]\ntenant = \"0\"\ndram_bytes = \"64KiB\"\nshare = 2\n");
    let daemon = Running::start(&place);
    let client = daemon.attach(1);
    publish(&client, 1, &[0x11, 0x12]);
    client.request(LocalRequest::End { tag: tag(1) }).expect("sent");
    let [first, second, absent] = [0x11, 0x12, 0x13].map(|number: u8| format!("{number:02x}").repeat(16));
    assert_eq!(told(&daemon.obey(&["pins"])).1, "0 blocks kept, 0 bytes of at most 512KiB\n");
    let (code, text, why) = told(&daemon.obey(&["pin", &first, &second, &absent, "--ttl", "3600", "--by", "me"]));
    let expected = "2 kept, 0 being read from SSD, 1 not there, 0 without room\n";
    assert_eq!((code, text.as_str()), (Some(1), expected), "{why}");
    assert!(why.contains("1 of 3 are not there"), "{why}");
    assert_eq!(told(&daemon.obey(&["pin", &first, "--ttl", "60"])).0, Some(0));
    // He who has pinned them has gone.
    drop(client);
    assert_eq!(daemon.json(&["evict", "--all"])["held"], 2);
    let pins = daemon.json(&["pins"]);
    assert_eq!(
        (&pins["blocks"], &pins["pins"][0]["by"], &pins["pins"][0]["blocks"]),
        (&2.into(), &"me".into(), &2.into())
    );
    assert_eq!(pins["pins"][1]["by"], "transferd pin");
    let text = told(&daemon.obey(&["pins"])).1;
    assert!(text.contains("first may go in") && text.contains("59 min"), "{text}");
    assert!(daemon.get("/metrics").1.contains("pyengine_pool_kept_blocks{node=\"n1\"} 2"));
    // Small blocks take a page each.
    let quotas = daemon.json(&["quotas"]);
    assert_eq!(
        (&quotas[0]["tenant"], &quotas[0]["share"], &quotas[0]["dram_limit"]),
        (&0.into(), &2.into(), &65536.into())
    );
    assert!(quotas[0]["dram_bytes"].as_u64().is_some_and(|bytes| bytes >= 2 * 4096), "{quotas}");
    let text = told(&daemon.obey(&["quotas"])).1;
    assert!(text.starts_with("  namespace") && text.contains("64KiB"), "{text}");

    let (code, text, why) = told(&daemon.obey(&["unpin", &first, &second, "--by", "transferd pin"]));
    assert_eq!((code, text.as_str()), (Some(1), "1 let go, 1 not kept\n"), "{why}");
    assert_eq!(told(&daemon.obey(&["unpin", &first, &second])).1, "2 let go, 0 not kept\n");
    assert_eq!(daemon.json(&["evict", "--all"])["dropped"], 2);
    let none = Place::new("keeps-none", "");
    let daemon = Running::start(&none);
    assert!(told(&daemon.obey(&["quotas"])).1.contains("no [[quota]]"));
}
