//! How a peer answers fetches, and when one is given up that does not.
//!
//! ```text
//! answers ---- nothing for `silence`, or a fetch not in `patience` ----> what it owes is asked of others
//!    ^                                                                   and it rests: 10 s, then twice as long each
//!    |                                     time: one more fetch          time, at most 5 min
//!    \------------------------ any answer, a late one too ---------------
//! ```
//!
//! Who is given up may still write into the slots that he was told of: whoever wants the block gets another slot, and the
//! old one is nobody's to commit before the peer says that all is over, or its link ends (`fetch.rs`).

use crate::types::Nanos;

use super::SECOND;

/// A session ends by itself after 3 s of silence, and a copy that is lost on the way is sent again within that: who lives
/// and is only busy gets more.
const FLOOR: Nanos = 5 * SECOND;
/// How much slower than it was a peer may become: others may ask it, too.
const SLACK: u64 = 4;
/// Bytes per second of a peer that was never measured: a slow disk gives that.
const UNKNOWN: u64 = 50 << 20;
/// Answers are counted for so long, at least, to tell a rate.
const WINDOW: Nanos = SECOND / 4;
/// The first rest, and the longest.
const REST: (Nanos, Nanos) = (10 * SECOND, 300 * SECOND);

/// One peer's answers. Lives as long as its link.
#[derive(Debug, Default)]
pub(super) struct Pace {
    /// Bytes that were asked for, and neither came nor were given up.
    pub owed: u64,
    /// When it answered last.
    pub heard: Nanos,
    /// Bytes per second.
    rate: Option<u64>,
    /// Since when answers are counted, and the bytes that came.
    window: Option<(Nanos, u64)>,
    /// It was silent: how long it is not asked, and until when. Zero: it answers.
    rest: Nanos,
    until: Nanos,
}

impl Pace {
    /// So many bytes were asked for.
    pub fn asked(&mut self, bytes: u64, now: Nanos) {
        if self.owed == 0 {
            self.window = Some((now, 0));
        }
        self.owed += bytes;
    }

    /// It has answered: `came` bytes, or none, of `owed` that it owed.
    pub fn answered(&mut self, owed: u64, came: u64, now: Nanos) {
        self.heard = now;
        self.rest = 0;
        self.owed -= owed;
        let Some((since, bytes)) = &mut self.window else { return };
        *bytes += came;
        let (took, bytes) = (now - *since, *bytes);
        if took < WINDOW && self.owed > 0 {
            return;
        }
        if bytes > 0 {
            let measured = (u128::from(bytes) * u128::from(SECOND) / u128::from(took.max(1))) as u64;
            self.rate =
                Some(self.rate.map_or(measured, |rate| (rate / 10 * 7).saturating_add(measured / 10 * 3)).max(1));
        }
        self.window = (self.owed > 0).then_some((now, 0));
    }

    /// Nobody wants these bytes of it any more.
    pub fn waived(&mut self, bytes: u64) {
        self.owed -= bytes;
        if self.owed == 0 {
            self.window = None;
        }
    }

    /// It was silent for too long: it rests.
    pub fn silent(&mut self, now: Nanos) {
        self.rest = if self.rest == 0 { REST.0 } else { (self.rest * 2).min(REST.1) };
        self.until = now + self.rest;
    }

    /// True if it may be asked now. After a rest, by one message at a time until it answers.
    pub fn permits(&self, now: Nanos) -> bool {
        self.rest == 0 || (now >= self.until && self.owed == 0)
    }

    /// How long all that it owes may take.
    pub fn patience(&self) -> Nanos {
        FLOOR + SLACK * self.takes(self.owed)
    }

    /// How long it may say nothing while it has these bytes under way.
    pub fn silence(&self, under_way: u64) -> Nanos {
        FLOOR + SLACK * self.takes(self.owed.min(under_way))
    }

    fn takes(&self, bytes: u64) -> Nanos {
        let nanos = u128::from(bytes) * u128::from(SECOND) / u128::from(self.rate.unwrap_or(UNKNOWN));
        // A day is as good as for ever, and sums of it do not overflow.
        u64::try_from(nanos).unwrap_or(u64::MAX).min(86_400 * SECOND)
    }
}

#[cfg(test)]
mod tests {
    //! Goal: patience follows what is owed and what was measured; rests grow, and end with any answer. Method: by hand.
    use super::*;

    #[test]
    fn patience_is_what_was_measured_and_a_floor() {
        let mut pace = Pace::default();
        assert_eq!(pace.patience(), FLOOR);
        pace.asked(UNKNOWN, 0);
        assert_eq!(pace.patience(), FLOOR + SLACK * SECOND);
        assert_eq!(pace.silence(UNKNOWN / 2), FLOOR + SLACK * SECOND / 2);
        // All of it comes within a tenth of a second.
        pace.answered(UNKNOWN, UNKNOWN, SECOND / 10);
        pace.asked(UNKNOWN, SECOND);
        assert_eq!(pace.patience(), FLOOR + SLACK * SECOND / 10);
        // Slower, and refusals tell nothing of the rate.
        pace.answered(UNKNOWN / 2, UNKNOWN / 2, 3 * SECOND);
        let slower = pace.rate;
        assert!(slower < Some(UNKNOWN * 10) && slower > Some(UNKNOWN * 5), "{slower:?}");
        pace.answered(UNKNOWN - UNKNOWN / 2, 0, 9 * SECOND);
        assert_eq!((pace.rate, pace.owed, pace.patience()), (slower, 0, FLOOR));
    }

    #[test]
    fn rests_grow_and_end_with_an_answer() {
        let mut pace = Pace::default();
        let mut now = 0;
        let mut rests = Vec::new();
        for _ in 0..8 {
            assert!(pace.permits(now));
            pace.asked(10, now);
            pace.waived(10);
            pace.silent(now);
            assert!(!pace.permits(now) && !pace.permits(pace.until - 1));
            rests.push(pace.until - now);
            now = pace.until;
        }
        assert_eq!((rests[0], rests[1], rests[7]), (REST.0, 2 * REST.0, REST.1));
        pace.asked(10, now);
        assert!(!pace.permits(now), "one message at a time");
        pace.answered(10, 0, now);
        assert!(pace.permits(now));
        pace.asked(10, now);
        assert!(pace.permits(now));
    }
}
