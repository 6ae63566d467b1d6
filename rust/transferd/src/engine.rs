//! What the commands have in common: an engine with these settings, and numbers as people read them.

use std::path::PathBuf;
use std::time::Duration;

use clap::ValueEnum;
use transfer::config::{encrypts, parse_bytes, read_session_key};
use transfer::endpoint::{Endpoint, Settings};
use transfer::error::Error;
use transfer::mover::Via;
use transfer::transport::Kind;

/// The region that a target offers, and a bench looks for.
pub const REGION: &str = "bench";

/// Flags of every command.
#[derive(clap::Args, Debug, Clone)]
pub struct EngineArguments {
    /// The cluster's secret: 64 hex digits or raw bytes, readable by its owner only
    #[arg(long, value_name = "FILE")]
    secret_file: Option<PathBuf>,
    /// Encrypt what travels by TCP (TLS 1.3); the other side must have it too
    #[arg(long)]
    tls: bool,
    /// The path to take
    #[arg(long, default_value = "auto")]
    pub transport: Transport,
    /// Seconds to wait for an answer
    #[arg(long, default_value = "10", value_parser = seconds)]
    pub timeout: Duration,
}

/// A path, by name.
#[derive(ValueEnum, Clone, Copy, PartialEq, Eq, Debug)]
pub enum Transport {
    /// The best that stands
    Auto,
    /// Between processes of one host
    Shm,
    /// By a network card
    Rdma,
    /// Over sockets
    Tcp,
}

impl Transport {
    /// As the engine has it.
    pub fn via(self) -> Via {
        match self {
            Self::Auto => Via::Auto,
            Self::Shm => Via::Only(Kind::Shm),
            Self::Rdma => Via::Only(Kind::Rdma),
            Self::Tcp => Via::Only(Kind::Tcp),
        }
    }
}

impl EngineArguments {
    /// Starts an engine.
    pub fn start(&self, listen: Option<String>, change: impl FnOnce(&mut Settings)) -> Result<Endpoint, Error> {
        let key = self.secret_file.as_deref().map(read_session_key).transpose()?;
        if self.tls {
            encrypts(self.transport.via())?;
        }
        let mut settings = Settings { key, listen, tls: self.tls, ..Settings::default() };
        change(&mut settings);
        Endpoint::start(settings)
    }
}

/// For flags that are a size.
pub fn size(text: &str) -> Result<u64, String> {
    parse_bytes(text).map_err(|error| error.to_string())
}

/// For flags that are a time in seconds.
pub fn seconds(text: &str) -> Result<Duration, String> {
    let refuse = || format!("{text:?} is no number of seconds");
    let seconds: f64 = text.parse().map_err(|_| refuse())?;
    // A year is for ever; much more would not fit. Not by `min`, which prefers any number to one that is none.
    let seconds = if seconds > 3.2e7 { 3.2e7 } else { seconds };
    Duration::try_from_secs_f64(seconds).map_err(|_| refuse())
}

/// Microseconds of measured times: the value below which `per_mille` of them lie (nearest rank). `times` is sorted.
pub fn microseconds(times: &[Duration], per_mille: usize) -> f64 {
    let rank = (times.len() * per_mille).div_ceil(1000).clamp(1, times.len().max(1));
    times.get(rank - 1).map_or(f64::NAN, |time| time.as_nanos() as f64 / 1e3)
}

/// `64KiB`, `1MiB`, `1000`.
pub fn size_name(bytes: u64) -> String {
    for (unit, shift) in [("GiB", 30), ("MiB", 20), ("KiB", 10)] {
        if bytes > 0 && bytes.trailing_zeros() >= shift {
            return format!("{}{unit}", bytes >> shift);
        }
    }
    bytes.to_string()
}

#[cfg(test)]
mod tests {
    //! Goal: numbers are read and written as people mean them. Method: examples and borders.
    use super::*;

    #[test]
    fn percentiles_are_values_that_were_measured() {
        let times: Vec<Duration> = (1..=1000).map(Duration::from_micros).collect();
        assert_eq!(
            [0, 500, 990, 999, 1000].map(|per_mille| microseconds(&times, per_mille)),
            [1.0, 500.0, 990.0, 999.0, 1000.0]
        );
        assert_eq!(microseconds(&times[..1], 999), 1.0);
        assert!(microseconds(&[], 500).is_nan());
    }

    #[test]
    fn sizes_and_seconds() {
        assert_eq!([0, 1000, 4096, 1 << 20, 3 << 30].map(size_name), ["0", "1000", "4KiB", "1MiB", "3GiB"]);
        assert_eq!(seconds("0.5"), Ok(Duration::from_millis(500)));
        assert_eq!([seconds("-1"), seconds("nan"), seconds("x")].map(|result| result.is_err()), [true; 3]);
    }
}
