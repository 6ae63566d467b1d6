//! Whether a path may be tried: a circuit breaker.
//!
//! ```text
//! closed --- `losses` in a row, or it could not be made ---> open, for 50 ms, then twice as long each time, at most 2 s
//!   ^                                                         |  ^
//!   |                                                    time |  | lost again
//!   \------------------ the peer answers ------------------ half open: one copy at a time, as a probe
//! ```
//!
//! Nothing is banned for ever, and a path that comes back is found within 2.5 s of traffic.

use crate::random::Random;
use crate::types::Nanos;

/// The first rest.
const FIRST: Nanos = 50_000_000;
/// The longest rest: a healed path is back soon enough, and a dead one costs a dial every two seconds.
const LONGEST: Nanos = 2_000_000_000;

/// How the breaker of a path is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// All copies may use the path.
    Closed,
    /// None may before this time.
    Open {
        /// When the next probe is allowed.
        until: Nanos,
    },
    /// One copy at a time, to see whether it gets through.
    HalfOpen,
}

/// One path's breaker.
#[derive(Clone, Debug)]
pub(super) struct Breaker {
    state: State,
    /// Losses since the last answer.
    losses: u32,
    /// How many losses in a row open it.
    limit: u32,
    rest: Nanos,
}

impl Breaker {
    /// Closed; opens after `limit` losses in a row.
    pub fn new(limit: u32) -> Self {
        Self { state: State::Closed, losses: 0, limit, rest: FIRST }
    }

    pub fn state(&self) -> State {
        self.state
    }

    /// True if the path may be used, or made, now. Turns an open breaker whose rest is over into a half open one.
    pub fn permits(&mut self, now: Nanos) -> bool {
        match self.state {
            State::Open { until } if now < until => false,
            State::Open { .. } => {
                self.state = State::HalfOpen;
                true
            }
            State::Closed | State::HalfOpen => true,
        }
    }

    /// The peer answered over this path, whatever it said.
    pub fn answered(&mut self) {
        *self = Self::new(self.limit);
    }

    /// Copies were lost. True if that opened it.
    pub fn lost(&mut self, now: Nanos, random: &mut Random) -> bool {
        self.losses += 1;
        let opens = match self.state {
            State::Closed => self.losses >= self.limit,
            State::HalfOpen => true,
            // Older copies; it rests already.
            State::Open { .. } => false,
        };
        if opens {
            self.open(now, random);
        }
        opens
    }

    /// The path could not be made, or it keeps losing: it rests.
    pub fn open(&mut self, now: Nanos, random: &mut Random) {
        // Between 3/4 and 5/4 of the rest, so that many peers do not dial one that comes back in the same instant.
        let until = now + self.rest * 3 / 4 + random.below(self.rest / 2);
        self.rest = (self.rest * 2).min(LONGEST);
        self.state = State::Open { until };
    }

    /// Somebody who should know says that the path is worth a try at once.
    pub fn hurry(&mut self, now: Nanos) {
        if let State::Open { until } = &mut self.state {
            *until = now;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // Goal: opens after so many losses in a row, rests longer each time up to 2.5 s, closes with the first answer.
    // Method: losses and answers by hand.
    #[test]
    fn rests_grow_and_end() {
        let (mut breaker, mut random) = (Breaker::new(3), Random(1));
        assert!(!breaker.lost(0, &mut random) && !breaker.lost(0, &mut random));
        breaker.answered();
        assert!(!breaker.lost(0, &mut random) && !breaker.lost(0, &mut random), "not in a row");
        assert!(breaker.lost(0, &mut random));
        let (mut now, mut rests) = (0, Vec::new());
        for _ in 0..10 {
            let State::Open { until } = breaker.state() else { panic!("{breaker:?}") };
            assert!(!breaker.permits(until - 1) && !breaker.lost(now, &mut random), "it rests");
            rests.push(until - now);
            now = until;
            assert!(breaker.permits(now) && breaker.state() == State::HalfOpen);
            assert!(breaker.lost(now, &mut random), "one lost probe is enough");
        }
        assert!((37_500_000..=62_500_000).contains(&rests[0]), "{rests:?}");
        assert!(rests[1] > rests[0] && rests.iter().all(|rest| *rest <= LONGEST * 5 / 4), "{rests:?}");
        assert!(rests[9] >= LONGEST * 3 / 4);
        breaker.hurry(now);
        assert!(breaker.permits(now));
        breaker.answered();
        assert_eq!((breaker.state(), breaker.rest), (State::Closed, FIRST));
    }
}
