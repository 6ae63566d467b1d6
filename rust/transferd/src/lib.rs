//! The command line of `transferd`, for the binary and for the wheel's console script.
//!
//! Without a command it is the daemon. Some commands speak to a running one ([`admin`]); the others look at transfers from
//! outside: [`bench`] measures them against a [`target`], [`ping`] says how a peer is reached.

mod admin;
mod bench;
mod engine;
mod json_lines;
mod ping;
mod settings;
mod signals;
mod supervisor;
mod target;
mod topology;
mod watch;

use std::ffi::OsString;
use std::io::{IsTerminal, Write};
use std::os::fd::AsFd;
use std::path::Path;
use std::time::{Duration, Instant};

use clap::{Parser, Subcommand};
use nix::sys::signal::Signal;
use serde::Serialize;
use tracing_subscriber::filter::LevelFilter;
use transfer::daemon::Daemon;
use transfer::error::Error;

use signals::{Signals, Woken};

/// What a daemon needs to stop when nothing is held any more: up to 3 s for SSD, the rest for its threads.
const CLOSING: Duration = Duration::from_secs(10);

/// Serves one node's KV pool until SIGTERM or SIGINT, and then until nothing is held. Flags win over the file.
#[derive(Parser, Debug)]
#[command(name = "transferd", version, args_conflicts_with_subcommands = true)]
struct Arguments {
    #[command(subcommand)]
    command: Option<Command>,
    #[command(flatten)]
    settings: settings::Flags,
    /// Write one line of JSON with node, address, incarnation and socket to this descriptor when serving
    #[arg(long, value_name = "N")]
    ready_fd: Option<u32>,
    /// Stop when the process that started this one ends
    #[arg(long, global = true)]
    die_with_parent: bool,
    /// What to log to stderr: off, error, warn, info, debug or trace [default: info, but warn for commands that end by themselves]
    #[arg(long, value_name = "LEVEL", global = true)]
    log: Option<LevelFilter>,
}

#[derive(Subcommand, Debug)]
enum Command {
    /// Offers memory for `transferd bench` to write and read, until SIGTERM or SIGINT
    Target(target::Arguments),
    /// Measures copies to and from a target
    Bench(bench::Arguments),
    /// Says which network cards are near which memory
    Topology(topology::Arguments),
    /// Prints the key with which others may look at the daemons of a cluster: their --http beyond loopback
    WatchKey(watch::Arguments),
    /// Says by which path a peer is reached, how fast it answers, and in which life it is; or why not
    Ping(ping::Arguments),
    #[command(flatten)]
    Admin(admin::Command),
}

#[derive(Serialize)]
struct Ready<'a> {
    node: &'a str,
    address: &'a str,
    incarnation: u64,
    socket: Option<&'a Path>,
    http: Option<String>,
}

/// Runs the daemon or a command with these arguments (without the program's name); returns the exit status: 0 after a
/// signal, or if all is well; 2 for a mistake in the arguments or the configuration; 1 for anything else.
pub fn run(arguments: impl Iterator<Item = OsString>) -> i32 {
    let arguments = match Arguments::try_parse_from(std::iter::once("transferd".into()).chain(arguments)) {
        Ok(arguments) => arguments,
        Err(error) => {
            // Help and version come here too. If the terminal is gone there is nobody to tell.
            let _ = error.print();
            return error.exit_code();
        }
    };
    let level = arguments.log.unwrap_or(match arguments.command {
        None | Some(Command::Target(_)) => LevelFilter::INFO,
        Some(_) => LevelFilter::WARN,
    });
    match arguments.command.is_none().then(|| arguments.settings.log_json()).flatten() {
        Some(node) => json_lines::begin(level, node),
        None => logging(level),
    }
    match obey(&arguments) {
        Ok(()) => 0,
        Err(error) => {
            eprintln!("transferd: {error}");
            if error.kind == transfer::error::ErrorKind::GiveUp { 2 } else { 1 }
        }
    }
}

fn obey(arguments: &Arguments) -> Result<(), Error> {
    if arguments.die_with_parent {
        nix::sys::prctl::set_pdeathsig(Signal::SIGTERM)
            .map_err(|errno| Error::give_up(format!("--die-with-parent: {errno}")))?;
    }
    match &arguments.command {
        None => serve(arguments),
        Some(Command::Target(target)) => target::run(target),
        Some(Command::Bench(bench)) => bench::run(bench),
        Some(Command::Ping(ping)) => ping::run(ping),
        Some(Command::WatchKey(watch)) => watch::run(watch),
        Some(Command::Admin(command)) => admin::run(command),
        Some(Command::Topology(topology)) => topology::run(topology),
    }
}

fn logging(level: LevelFilter) {
    // Fails if this process logs already; then that log is used.
    let log = tracing_subscriber::fmt().with_max_level(level).with_ansi(std::io::stderr().is_terminal());
    let _ = log.with_writer(std::io::stderr).try_init();
}

fn serve(arguments: &Arguments) -> Result<(), Error> {
    let config = arguments.settings.configure()?;
    Signals::held_back(|signals| {
        let mut daemon = Daemon::start(&config)?;
        let address = daemon.address();
        let http = daemon.http().map(|http| http.to_string());
        tracing::info!(node = %address.node, address = %address.address, http, "serving");
        let socket = config.socket.as_deref();
        let (node, incarnation) = (&*address.node, address.incarnation);
        let ready = Ready { node, address: &address.address, incarnation, socket, http };
        if let Some(descriptor) = arguments.ready_fd {
            announce(descriptor, &ready)?;
        }
        supervisor::ready(&format!("{node} serves"));
        let signal = match signals.wait(&[daemon.ended()], None)? {
            Woken::Signal(signal) => signal,
            Woken::Ready(_) | Woken::Late => return Err(failed()),
        };
        let within = Duration::from_secs(config.drain_seconds);
        tracing::info!("stopping on {signal}, {} s from now at the latest", within.as_secs());
        supervisor::stopping("draining", within + CLOSING);
        drain(&daemon, signals, within)?;
        daemon.stop();
        Ok(())
    })
}

/// Lets what is held come to its end; a second signal, or the end of the time, cuts it off.
fn drain(daemon: &Daemon, signals: &Signals, within: Duration) -> Result<(), Error> {
    let quiet = match daemon.drain() {
        Ok(quiet) => quiet,
        Err(error) => {
            tracing::warn!("stopping at once: {error}");
            return Ok(());
        }
    };
    match signals.wait(&[daemon.ended(), quiet.as_fd()], Some(Instant::now() + within))? {
        Woken::Ready(0) => return Err(failed()),
        Woken::Ready(_) => tracing::info!("nothing is held"),
        Woken::Signal(signal) => tracing::warn!("stopping at once on a second signal, {signal}"),
        Woken::Late => tracing::warn!("stopping with something held: {} s are over", within.as_secs()),
    }
    Ok(())
}

fn failed() -> Error {
    Error::retry("the engine has failed: its panic is above; start the daemon again")
}

fn announce(descriptor: u32, ready: &Ready<'_>) -> Result<(), Error> {
    let problem = |error: &dyn std::fmt::Display| Error::give_up(format!("--ready-fd {descriptor}: {error}"));
    let mut line = serde_json::to_vec(ready).map_err(|error| problem(&error))?;
    line.push(b'\n');
    let mut pipe = std::fs::OpenOptions::new()
        .write(true)
        .open(format!("/proc/self/fd/{descriptor}"))
        .map_err(|error| problem(&error))?;
    pipe.write_all(&line).map_err(|error| problem(&error))?;
    // The inherited one is closed too, so that the reader sees the end.
    nix::unistd::close(descriptor as i32).map_err(|error| problem(&error))
}

#[cfg(test)]
mod tests {
    //! Goal: what the files for deployment start is what there is. Method: read them, and parse their command lines.
    use super::*;

    #[test]
    fn the_units_flags_are_flags() {
        let unit = include_str!("../examples/transferd.service");
        let line = unit.lines().find_map(|line| line.strip_prefix("ExecStart=")).expect("it starts something");
        Arguments::try_parse_from(line.split(' ')).expect("good flags");
        // Systemd waits at least as long as the daemon with its defaults does.
        let seconds = unit.lines().find_map(|line| line.strip_prefix("TimeoutStopSec=")).expect("a limit");
        let seconds: u64 = seconds.trim_end_matches('s').parse().expect("seconds");
        assert!(seconds >= transfer::config::DRAIN_SECONDS + CLOSING.as_secs(), "{seconds}");
    }

    #[test]
    fn the_containers_files_and_flags_are_there() {
        let text = include_str!("../examples/Containerfile");
        let root = concat!(env!("CARGO_MANIFEST_DIR"), "/../..");
        for words in text.lines().filter_map(|line| line.strip_prefix("COPY ")).filter(|line| !line.starts_with("--")) {
            let words: Vec<&str> = words.split(' ').collect();
            let sources = &words[..words.len() - 1];
            sources.iter().for_each(|source| assert!(Path::new(root).join(source).exists(), "{source}"));
        }
        let list = |text: &str| serde_json::from_str::<Vec<String>>(text).expect("a list of words");
        let after = |what: &str| text.lines().find_map(|line| line.split_once(what)).expect(what).1;
        let mut line = list(after("ENTRYPOINT "));
        line.extend(list(text.lines().find_map(|line| line.strip_prefix("CMD ")).expect("flags")));
        Arguments::try_parse_from(line).expect("good flags");
        Arguments::try_parse_from(list(after("--timeout=5s CMD "))).expect("a good command");
        assert_ne!(after("USER "), "0", "not as root");
    }
}
