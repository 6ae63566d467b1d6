//! Goal: who looks at transfers from outside is told the truth, in text and in JSON, and how to mend what is wrong.
//! Method: the real program, in processes of its own: a target, and commands against it.

use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Child, Command, Output, Stdio};

use serde_json::Value;
use transfer::config::Config;
use transfer::daemon::Daemon;

fn transferd(words: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_transferd")).args(words).output().expect("starts")
}

fn told(output: &Output) -> (String, String) {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (text(&output.stdout), text(&output.stderr))
}

fn lines(output: &Output) -> Vec<Value> {
    let (out, err) = told(output);
    assert!(output.status.success(), "{out}{err}");
    out.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect()
}

/// A target, ended with the test.
struct Target {
    process: Child,
    ready: Value,
}

impl Target {
    fn start(more: &[&str]) -> Self {
        let mut process = Command::new(env!("CARGO_BIN_EXE_transferd"))
            .args(["target", "--bytes", "4MiB", "--die-with-parent", "--log", "warn"])
            .args(more)
            .stdout(Stdio::piped())
            .spawn()
            .expect("starts");
        let mut line = String::new();
        BufReader::new(process.stdout.take().expect("piped")).read_line(&mut line).expect("says when it is ready");
        Self { process, ready: serde_json::from_str(&line).expect("JSON") }
    }

    fn address(&self) -> &str {
        self.ready["address"].as_str().expect("text")
    }
}

impl Drop for Target {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

#[test]
fn ping_says_which_path_is_taken_and_which_life_it_is() {
    let target = Target::start(&[]);
    let answer = &lines(&transferd(&["ping", target.address(), "--count", "3", "--json"]))[0];
    assert_eq!((&answer["node"], &answer["incarnation"]), (&target.ready["node"], &target.ready["incarnation"]));
    let paths = answer["paths"].as_array().expect("a list");
    assert_eq!(paths.iter().filter(|path| path["taken"] == true).count(), 1, "{paths:?}");
    let down_without_a_reason = |path: &&Value| path["state"] == "down" && path["why"] == "";
    assert_eq!(paths.iter().find(down_without_a_reason), None);
    for times in ["session", "read_4kib"] {
        let [min, median, max] = ["min_us", "p50_us", "max_us"].map(|name| answer[times][name].as_f64().expect(times));
        assert!(0.0 < min && min <= median && median <= max, "{answer}");
    }

    let answer = &lines(&transferd(&["ping", target.address(), "--transport", "tcp", "--json"]))[0];
    let paths = answer["paths"].as_array().expect("a list");
    assert!(paths.iter().any(|path| path["transport"] == "tcp" && path["taken"] == true), "{paths:?}");
    let (text, _) = told(&transferd(&["ping", target.address(), "--transport", "tcp"]));
    let expected = format!("incarnation {}", target.ready["incarnation"]);
    assert!(text.contains(&expected) && text.contains("<- taken") && text.contains("median"), "{text}");
}

/// A pool's daemon offers no memory, but says who it is and by which paths it is reached; however many ask, it goes on.
#[test]
fn ping_of_a_pool_daemon() {
    let config = Config { listen: Some("127.0.0.1:0".into()), ..Config::new("pool", 256 << 10) };
    let daemon = Daemon::start(&config).expect("a daemon starts");
    let me = daemon.address().clone();
    for via in ["tcp", "shm"] {
        let ping = transferd(&["ping", &me.address, "--transport", via, "--count", "3", "--json"]);
        let answer = &lines(&ping)[0];
        assert_eq!((&answer["node"], &answer["incarnation"]), (&Value::from("pool"), &Value::from(me.incarnation)));
        assert_eq!((&answer["paths"][0]["state"], &answer["read_4kib"]), (&Value::from("up"), &Value::Null));
        assert!(answer["session"]["p50_us"].as_f64().expect("a time") > 0.0);
    }
}

#[test]
fn ping_says_why_not() {
    // A port that was free a moment ago.
    let free = std::net::TcpListener::bind("127.0.0.1:0").expect("a port").local_addr().expect("bound").to_string();
    let output = transferd(&["ping", &free, "--timeout", "5"]);
    let (_, why) = told(&output);
    assert_eq!(output.status.code(), Some(1), "{why}");
    assert!(why.contains(&free) && why.contains("refused"), "{why}");

    let directory = std::env::temp_dir().join(format!("pyengine-commands-{}", std::process::id()));
    std::fs::create_dir_all(&directory).expect("a temporary directory");
    let [ours, theirs] = ["ours", "theirs"].map(|name| secret(&directory, name));
    let target = Target::start(&["--secret-file", &theirs]);
    let output = transferd(&["ping", target.address(), "--secret-file", &ours]);
    let (_, why) = told(&output);
    assert_eq!(output.status.code(), Some(2), "repeating does not help: {why}");
    assert!(why.contains("secret"), "{why}");
    assert!(transferd(&["ping", target.address(), "--secret-file", &theirs]).status.success());
    std::fs::remove_dir_all(&directory).expect("our own directory");
}

fn secret(directory: &std::path::Path, name: &str) -> String {
    use std::os::unix::fs::PermissionsExt;
    let path: PathBuf = directory.join(name);
    std::fs::write(&path, format!("{name} and sixteen bytes more")).expect("writable");
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600)).expect("our own file");
    path.to_str().expect("a plain path").into()
}

#[test]
fn bench_measures_every_combination_that_fits() {
    let target = Target::start(&[]);
    let sizes = ["--block", "4KiB,1MiB", "--batch", "1,5", "--lanes", "1,2", "--seconds", "0.02", "--json"];
    let rows = lines(&transferd(&[&["bench", target.address(), "--transport", "tcp"], &sizes[..]].concat()));
    let seen: Vec<_> = rows
        .iter()
        .map(|row| (row["lanes"].as_u64(), row["block"].as_u64(), row["batch"].as_u64(), row["op"].as_str()))
        .collect();
    let mut expected = Vec::new();
    for lanes in [1, 2] {
        // Five times 1 MiB are more than the target has.
        for (block, batch) in [(4096, 1), (4096, 5), (1 << 20, 1)] {
            expected.extend(["write", "read"].map(|op| (Some(lanes), Some(block), Some(batch), Some(op))));
        }
    }
    assert_eq!(seen, expected);
    for row in rows {
        let number = |name: &str| row[name].as_f64().expect(name);
        assert!(number("gb_per_s") > 0.0 && number("transfers") >= 1.0, "{row}");
        assert!(number("p50_us") <= number("p99_us") && number("p99_us") <= number("p999_us"), "{row}");
        assert_eq!((&row["transport"], &row["verified"]), (&Value::from("tcp"), &Value::from(0)));
    }
}

#[test]
fn bench_verifies_every_byte() {
    let target = Target::start(&[]);
    for checksums in [&[][..], &["--no-checksums"]] {
        let sizes = ["--block", "5000", "--batch", "7", "--seconds", "0.1", "--verify", "--json"];
        let rows = lines(&transferd(&[&["bench", target.address()], &sizes[..], checksums].concat()));
        assert_eq!(rows.iter().map(|row| row["op"].as_str().expect("text")).collect::<Vec<_>>(), ["write", "read"]);
        for row in &rows {
            let transfers = row["transfers"].as_u64().expect("a number");
            assert_eq!(row["verified"].as_u64(), Some(transfers * 5000 * 7));
        }
    }
    let (table, _) =
        told(&transferd(&["bench", target.address(), "--block", "4KiB", "--batch", "2", "--seconds", "0"]));
    assert_eq!(table.lines().count(), 3, "a head, write, read: {table}");
}

// Goal: the same over a network card: the paths that are asked for are the paths that are taken. Method: four devices.
#[test]
#[ignore = "needs RDMA devices: make test-rdma has some"]
fn rdma_devices_are_listed_and_carry_every_byte() {
    let (text, why) = told(&transferd(&["topology"]));
    for device in ["rxe0/1", "rxe1/1", "rxe2/1", "rxe3/1"] {
        assert!(text.lines().any(|line| line.starts_with(device) && line.contains("10.99.")), "{text}{why}");
    }
    println!("{text}");
    let target = Target::start(&[]);
    let sizes = ["--block", "5000,256KiB", "--batch", "7", "--seconds", "1", "--verify", "--json", "--timeout", "100"];
    let rows = lines(&transferd(&[&["bench", target.address(), "--transport", "rdma"], &sizes[..]].concat()));
    assert_eq!(rows.len(), 4, "two sizes, write and read");
    for row in &rows {
        println!("{row}");
        let bytes = row["transfers"].as_u64().expect("a number") * row["block"].as_u64().expect("a number") * 7;
        assert_eq!((row["transport"].as_str(), row["verified"].as_u64()), (Some("rdma"), Some(bytes)));
        assert!(bytes > 0);
    }
}

#[test]
fn impossible_wishes_are_refused_with_a_reason() {
    let target = Target::start(&[]);
    let refusals: [(&[&str], &str); 5] = [
        (&["bench", target.address(), "--block", "8MiB"], "--bytes"),
        (&["bench", target.address(), "--block", "much"], "2GiB"),
        (&["bench", target.address(), "--op", "swap"], "write"),
        (&["ping"], "PEER"),
        (&["target", "--listen", "0.0.0.0:0"], "secret"),
    ];
    for (words, hint) in refusals {
        let output = transferd(words);
        let (_, why) = told(&output);
        assert_eq!(output.status.code(), Some(2), "{words:?}: {why}");
        assert!(why.contains(hint), "{words:?}: {why}");
    }
}

#[test]
fn topology_says_what_there_is() {
    let (text, why) = told(&transferd(&["topology"]));
    assert!(!text.is_empty(), "{why}");
    let output = transferd(&["topology", "--overrides", "/nowhere/at/all"]);
    assert_eq!(output.status.code(), Some(2), "{}", told(&output).1);
}
