//! Which life of a process this is: a number that grows from start to start.
//!
//! It is the time of the start, as every host has one and nobody need hand it out. Peers that have seen a later life refuse an
//! earlier one as a leftover, so a clock that was set back must not make the next life look older: a daemon writes its
//! number down, beside what outlives it, and the next one takes a larger one. Nothing else in this crate looks at the wall
//! clock but to name a new SSD directory's birth: deadlines, rests and rates are of [`crate::link::now`], which never jumps.

use std::fs::OpenOptions;
use std::io::{ErrorKind, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use crate::types::Incarnation;

/// Larger ones are not believed: nobody's clock has been there (it is the year 2116), and numbers must not run out.
const LIMIT: Incarnation = 1 << 62;

/// The latest one of this process.
static LATEST: AtomicU64 = AtomicU64::new(0);

/// Nanoseconds since 1970: another one at each start, and a later start has a larger one, so that a peer that has seen
/// the new life refuses the old one. Within this process that holds whatever the clock does.
pub fn new_incarnation() -> Incarnation {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(1, |since| since.as_nanos() as Incarnation);
    next(now, 0)
}

/// As [`new_incarnation`], and larger than the one that was written into any of these files, into which it is written now. A
/// file that cannot be read or written does no harm: without it the clock alone decides.
pub fn new_incarnation_after(files: &[PathBuf]) -> Incarnation {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(1, |since| since.as_nanos() as Incarnation);
    after(now, files)
}

fn after(now: Incarnation, files: &[PathBuf]) -> Incarnation {
    let before = files.iter().filter_map(|file| read(file)).max().unwrap_or(0);
    if before > now {
        tracing::warn!(
            "this host's clock was set back since the node's last start: its lives are counted on from there"
        );
    }
    let life = next(now, before);
    for file in files {
        if let Err(error) = write(file, life) {
            tracing::debug!("{} cannot be written: {error}", file.display());
        }
    }
    life
}

/// The time, unless a life is known that began later.
fn next(now: Incarnation, before: Incarnation) -> Incarnation {
    let after = |latest: Incarnation| now.max(before.saturating_add(1)).max(latest.saturating_add(1));
    let latest = LATEST.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |latest| Some(after(latest)));
    // It always succeeds: the closure refuses nothing.
    latest.map_or(now, after)
}

fn read(file: &Path) -> Option<Incarnation> {
    let text = match std::fs::read_to_string(file) {
        Ok(text) => text,
        Err(error) => {
            if error.kind() != ErrorKind::NotFound {
                tracing::warn!("{} cannot be read: {error}", file.display());
            }
            return None;
        }
    };
    let life = text.trim().parse().ok().filter(|life| *life < LIMIT);
    if life.is_none() {
        tracing::warn!("{} holds no number of a life: it is written anew", file.display());
    }
    life
}

/// By another name first, so that what is there is always whole.
fn write(file: &Path, life: Incarnation) -> std::io::Result<()> {
    let half = file.with_extension("life.new");
    let mut new = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&half)?;
    writeln!(new, "{life}")?;
    new.sync_all()?;
    std::fs::rename(&half, file)
}

#[cfg(test)]
mod tests {
    //! Goal: lives are numbered upwards whatever the clock does, and whatever is in the files. Method: clocks by hand.
    use super::*;

    const HOUR: u64 = 3_600_000_000_000;

    fn directory() -> PathBuf {
        let path = std::env::temp_dir().join(format!("pyengine-life-{}-{}", std::process::id(), new_incarnation()));
        std::fs::create_dir(&path).expect("a place for files");
        path
    }

    #[test]
    fn a_clock_that_jumps_makes_no_life_older_than_the_one_before() {
        let directory = directory();
        let files = [directory.join("one"), directory.join("none/two"), directory.join("three")];
        let began = new_incarnation() + HOUR;
        let lives = [began, began - 5 * HOUR, began - 5 * HOUR, 1, began + 3 * HOUR, began - HOUR].map(|now| {
            // As another process would be: what this one has seen itself is forgotten.
            LATEST.store(0, Ordering::Relaxed);
            after(now, &files)
        });
        assert!(lives.is_sorted_by(|one, next| one < next), "{lives:?}");
        assert_eq!((lives[0], lives[4]), (began, began + 3 * HOUR), "the time, where it can be");
        // One of the places was lost, another one is rotten.
        std::fs::remove_file(&files[0]).expect("it was written");
        assert!(after(5, &files) > lives[5]);
        std::fs::write(&files[0], "what?").expect("writable");
        assert!(after(5, &files) > lives[5]);
        std::fs::write(&files[2], u64::MAX.to_string()).expect("writable");
        assert!(after(5, &files) < LIMIT);
        std::fs::remove_dir_all(directory).expect("ours");
    }

    #[test]
    fn within_a_process_the_clock_is_not_needed() {
        let lives: Vec<_> = std::iter::repeat_with(|| next(7, 0)).take(100).collect();
        assert!(lives.is_sorted_by(|one, next| one < next), "{lives:?}");
        assert!(new_incarnation() < new_incarnation());
    }
}
