//! The command line of `transferd`, for the binary and for the wheel's console script.
//!
//! Without a command it is the daemon. The commands are for looking at transfers from outside: [`bench`] measures them
//! against a [`target`], [`ping`] says how a peer is reached.

mod bench;
mod engine;
mod ping;
mod settings;
mod target;
mod topology;

use std::ffi::OsString;
use std::io::{IsTerminal, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::path::Path;

use clap::{Parser, Subcommand};
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{SigSet, SigmaskHow, Signal, pthread_sigmask};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use serde::Serialize;
use tracing_subscriber::filter::LevelFilter;
use transfer::daemon::Daemon;
use transfer::error::Error;

/// Serves one node's KV pool until SIGTERM or SIGINT. Flags win over the file.
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
    /// What to log to stderr: off, error, warn, info, debug or trace [default: info, but warn for bench and ping]
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
    /// Says by which path a peer is reached, how fast it answers, and in which life it is; or why not
    Ping(ping::Arguments),
}

#[derive(Serialize)]
struct Ready<'a> {
    node: &'a str,
    address: &'a str,
    incarnation: u64,
    socket: Option<&'a Path>,
}

/// Runs the daemon with these arguments (without the program's name); returns the exit status: 0 after a signal, 2 for
/// a mistake in the arguments or the configuration, 1 for anything else.
pub fn run(arguments: impl Iterator<Item = OsString>) -> i32 {
    let arguments = match Arguments::try_parse_from(std::iter::once("transferd".into()).chain(arguments)) {
        Ok(arguments) => arguments,
        Err(error) => {
            // Help and version come here too. If the terminal is gone there is nobody to tell.
            let _ = error.print();
            return error.exit_code();
        }
    };
    logging(arguments.log.unwrap_or(match arguments.command {
        None | Some(Command::Target(_)) => LevelFilter::INFO,
        Some(Command::Bench(_) | Command::Ping(_) | Command::Topology(_)) => LevelFilter::WARN,
    }));
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
    until_signal(|signals| {
        let mut daemon = Daemon::start(&config)?;
        let address = daemon.address();
        tracing::info!(node = %address.node, address = %address.address, "serving");
        let socket = config.socket.as_deref();
        let ready = Ready { node: &address.node, address: &address.address, incarnation: address.incarnation, socket };
        if let Some(descriptor) = arguments.ready_fd {
            announce(descriptor, &ready)?;
        }
        wait(signals, Some(daemon.ended()))?;
        daemon.stop();
        Ok(())
    })
}

/// Runs `work` with SIGTERM and SIGINT blocked, for it to `wait` for them.
fn until_signal(work: impl FnOnce(&SigSet) -> Result<(), Error>) -> Result<(), Error> {
    // Blocked before any thread starts, so that all inherit it and only `wait` takes them.
    let mut signals = SigSet::empty();
    signals.add(Signal::SIGTERM);
    signals.add(Signal::SIGINT);
    let mut before = SigSet::empty();
    let masking = |errno| Error::give_up(format!("cannot block signals: {errno}"));
    pthread_sigmask(SigmaskHow::SIG_BLOCK, Some(&signals), Some(&mut before)).map_err(masking)?;
    let outcome = work(&signals);
    pthread_sigmask(SigmaskHow::SIG_SETMASK, Some(&before), None).map_err(masking)?;
    outcome
}

/// Waits for a signal; fails if the engine ends first.
fn wait(signals: &SigSet, ended: Option<BorrowedFd<'_>>) -> Result<(), Error> {
    let problem = |errno: Errno| Error::give_up(format!("cannot wait for signals: {errno}"));
    let signal = SignalFd::with_flags(signals, SfdFlags::SFD_CLOEXEC).map_err(problem)?;
    loop {
        let mut wait = vec![PollFd::new(signal.as_fd(), PollFlags::POLLIN)];
        wait.extend(ended.map(|ended| PollFd::new(ended, PollFlags::POLLIN)));
        match poll(&mut wait, PollTimeout::NONE) {
            Ok(_) => {}
            Err(Errno::EINTR) => continue,
            Err(errno) => return Err(problem(errno)),
        }
        if wait.get(1).and_then(PollFd::any) == Some(true) {
            return Err(Error::retry("the engine has failed: its panic is above; start the daemon again"));
        }
        if let Some(info) = signal.read_signal().map_err(problem)? {
            tracing::info!("stopping on signal {}", info.ssi_signo);
            return Ok(());
        }
    }
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
