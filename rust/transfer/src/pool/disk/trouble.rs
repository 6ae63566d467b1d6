//! What the log does when its device fails: it says so once, goes on without, and tries again now and then.

use super::super::tier::{Fate, Health};
use super::io::{JobId, Work};
use super::log::{Asker, Doing, Log};

/// Reads that fail one after the other before the device counts as failed: one bad sector is no dead disk.
const BAD_READS: u32 = 3;
/// First pause before another try; each failure doubles it.
const PAUSE_MILLIS: u64 = 1000;
/// The longest.
const LONGEST_PAUSE_MILLIS: u64 = 60_000;

/// How the device does.
#[derive(Debug)]
pub(super) struct Trouble {
    health: Health,
    /// What failed is being tried again.
    trying: bool,
    retry_at: u64,
    pause: u64,
    /// When it was last well again.
    well_since: u64,
    /// Jobs before this one were begun before it failed, and say nothing about now.
    first_job: JobId,
    bad_reads: u32,
    silent: bool,
}

impl Default for Trouble {
    fn default() -> Self {
        Self {
            health: Health::Good,
            trying: false,
            retry_at: 0,
            pause: PAUSE_MILLIS,
            well_since: 0,
            first_job: 0,
            bad_reads: 0,
            silent: false,
        }
    }
}

impl Log {
    pub(super) fn health(&self) -> Health {
        if self.trouble.silent || self.io.silent() { Health::Failed } else { self.trouble.health }
    }

    pub(super) fn may_write(&self) -> bool {
        !self.trouble.silent && (self.trouble.health == Health::Good || self.trouble.trying)
    }

    /// True if what failed is being tried again.
    pub(super) fn tries(&self) -> bool {
        self.trouble.trying
    }

    /// Looks whether the device answers.
    pub(super) fn notice_silence(&mut self) {
        let silent = self.io.silent();
        if silent == self.trouble.silent {
            return;
        }
        self.trouble.silent = silent;
        if silent {
            tracing::warn!("{}: the device does not answer; going on without it", self.io.medium().name());
            self.drop_writes(Fate::Failed);
            self.drop_flushes();
            self.drop_reads();
        } else {
            tracing::warn!("{}: the device answers again", self.io.medium().name());
        }
    }

    /// Tries again what failed, when it is time.
    pub(super) fn retry(&mut self) {
        let trouble = &mut self.trouble;
        if trouble.health == Health::Good || trouble.trying || trouble.silent || self.io.millis() < trouble.retry_at {
            return;
        }
        trouble.trying = true;
        if trouble.health == Health::Failed {
            match self.segments.keys().next().copied() {
                Some(file) => self.submit(file, Work::Fetch { offset: 0, pages: 1 }, Doing::Probe),
                None => self.well_again(),
            }
        } else if self.has_spare() {
            // Without one, to prepare one is what is tried.
            self.ask_flush(Asker::Probe);
        }
    }

    fn fails(&mut self, health: Health, what: &str, error: &str) {
        let now = self.io.millis();
        let trouble = &mut self.trouble;
        if trouble.health == Health::Good && now.saturating_sub(trouble.well_since) > LONGEST_PAUSE_MILLIS {
            trouble.pause = PAUSE_MILLIS;
        }
        if trouble.health < health {
            tracing::warn!(
                "{}: {what}: {error}; trying again now and then, first in {} ms",
                self.io.medium().name(),
                trouble.pause
            );
            trouble.health = health;
        }
        (trouble.trying, trouble.first_job, trouble.retry_at) = (false, self.next_job, now + trouble.pause);
        trouble.pause = (trouble.pause * 2).min(LONGEST_PAUSE_MILLIS);
        self.reclaim = None;
        self.drop_writes(Fate::Failed);
        self.drop_flushes();
        if health == Health::Failed {
            self.drop_reads();
        }
    }

    pub(super) fn writing_failed(&mut self, job: JobId, error: &str) {
        if self.trouble.health == Health::Good || job >= self.trouble.first_job {
            self.fails(Health::ReadOnly, "the device takes no writes", error);
        }
    }

    pub(super) fn writing_works(&mut self, job: JobId) {
        if self.trouble.health == Health::ReadOnly && job >= self.trouble.first_job {
            self.well_again();
        }
    }

    pub(super) fn reading_failed(&mut self, error: &str) {
        self.trouble.bad_reads += 1;
        if self.trouble.bad_reads >= BAD_READS {
            self.fails(Health::Failed, "the device cannot be read", error);
        }
    }

    pub(super) fn reading_works(&mut self) {
        self.trouble.bad_reads = 0;
        if self.trouble.health == Health::Failed {
            self.well_again();
        }
    }

    pub(super) fn well_again(&mut self) {
        if self.trouble.health != Health::Good {
            tracing::warn!("{}: the device works again", self.io.medium().name());
        }
        (self.trouble.health, self.trouble.trying) = (Health::Good, false);
        self.trouble.well_since = self.io.millis();
    }
}
