//! How many bytes may be under way on one path: about [`TARGET`] of what the link carries, so that urgent copies and
//! cancelled transfers wait as long on a slow link as on a fast one. Sans-IO.
//!
//! All that was handed to the transport and not answered counts: the lanes' queues and both kernels' buffers hold a part
//! of the window, never more than it.
//!
//! ```text
//! window = rate x max(TARGET, 1.25 x base)      in whole pieces, at least two, at most what the settings say
//! ```
//!
//! * A **round** lasts from one look to the first answer of a copy that was sent after it. Its bytes by its length are the
//!   rate, the best being remembered for [`MEMORY`]: a thread that was not scheduled in time closes nothing.
//! * **base** is what a copy takes when hardly anything is under way. It keeps long links full: were the window too small
//!   for one, nothing would queue, copies would take no longer than `base`, and the window would grow by the 1.25.
//! * The window changes only in rounds in which it was what held copies back, and at most doubles in one: it opens in a
//!   few round trips from four pieces, and load that ebbs does not close it.
//! * On a long link that is never idle the base would be known once and for all. So where it matters the window closes
//!   for one round a second, but not more often than each [`ROUNDS_PER_LOOK`] round trips.

use crate::transport::PIECE_BYTES;
use crate::types::Nanos;

/// What is under way is as much as the link carries in this time: an urgent copy hardly notices, and at 2 GB/s, where
/// threads are the slower ones, they have 8 MiB to work on.
const TARGET: Nanos = 4_000_000;
/// How long a rate is remembered that later rounds did not reach.
const MEMORY: Nanos = 64_000_000;
/// Between two looks at the base of a link that is never idle, and never more than one in so many round trips: what that
/// costs is below 2 %.
const LOOK_EVERY: Nanos = 1_000_000_000;
const ROUNDS_PER_LOOK: u64 = 64;
/// One piece travels while the next one is on its way to the socket.
const LEAST: u64 = 2 * PIECE_BYTES as u64;
/// Before anything is known of the link.
const FIRST: u64 = 4 * PIECE_BYTES as u64;

/// The window of one path.
#[derive(Clone, Copy, Debug)]
pub(super) struct Window {
    bytes: u64,
    least: u64,
    most: u64,
    /// Bytes per second.
    rate: u64,
    /// What a copy takes when at most `least` bytes are under way; 0: not known.
    base: Nanos,
    /// Since when no more than that is under way; `MAX`: more is.
    quiet: Nanos,
    /// The next base is waited for, with a closed window.
    looking: bool,
    looked: Nanos,
    /// The round: its begin, what was answered in it, and whether the window held something back.
    began: Nanos,
    answered: u64,
    limited: bool,
}

impl Window {
    /// Of a path that nothing is known of.
    pub fn new(most: u64) -> Self {
        Self {
            bytes: FIRST.min(most),
            least: LEAST.min(most),
            most,
            rate: 0,
            base: 0,
            quiet: 0,
            looking: false,
            looked: 0,
            began: 0,
            answered: 0,
            limited: false,
        }
    }

    /// Whether this copy may join what is under way. One copy alone always may.
    pub fn admits(&mut self, under_way: u64, bytes: u64) -> bool {
        let room = if self.looking { self.least } else { self.bytes };
        let admitted = under_way + bytes <= room;
        self.limited |= !admitted;
        admitted
    }

    /// A copy goes out; `under_way` counts it.
    pub fn sent(&mut self, bytes: u64, under_way: u64, now: Nanos) {
        if under_way == bytes {
            // What was not sent before says nothing about the link.
            (self.began, self.answered, self.limited, self.quiet) = (now, 0, false, now);
        }
        if under_way > self.least {
            self.quiet = Nanos::MAX;
        }
    }

    /// The path has answered a copy that was sent then; `under_way` counts it no more.
    pub fn answered(&mut self, bytes: u64, sent: Nanos, under_way: u64, now: Nanos) {
        self.answered += bytes;
        if sent >= self.began && now > self.began {
            self.end_round(sent, now);
        }
        if under_way <= self.least && self.quiet == Nanos::MAX {
            self.quiet = now;
        }
    }

    fn end_round(&mut self, sent: Nanos, now: Nanos) {
        // While it looks at the base the window is what makes the link slow.
        let limited = self.limited && !self.looking;
        let took = now - self.began;
        let rate = u128::from(self.answered) * 1_000_000_000 / u128::from(took);
        let rate = u64::try_from(rate).unwrap_or(u64::MAX);
        let forgotten = if limited { u128::from(self.rate) * u128::from(took.min(MEMORY)) } else { 0 };
        self.rate = rate.max(self.rate - (forgotten / u128::from(MEMORY)) as u64);
        if sent >= self.quiet {
            let latency = now - sent;
            // It falls at once. It rises slowly: one copy that something has delayed is not a longer link.
            self.base =
                if self.base == 0 { latency } else { latency.min(self.base + latency.saturating_sub(self.base) / 4) };
            (self.looking, self.looked) = (false, now);
        }
        let stretched = self.base.saturating_add(self.base / 4);
        let every = LOOK_EVERY.max(self.base.saturating_mul(ROUNDS_PER_LOOK));
        self.looking |= stretched > TARGET && now - self.looked >= every;
        if limited {
            let goal = u128::from(self.rate) * u128::from(TARGET.max(stretched)) / 1_000_000_000;
            // Whole pieces: less room than one piece more would not let it grow.
            let goal = u64::try_from(goal).unwrap_or(u64::MAX).min(self.most).next_multiple_of(PIECE_BYTES.into());
            self.bytes = goal.min(2 * self.bytes).clamp(self.least, self.most);
        }
        (self.began, self.answered, self.limited) = (now, 0, false);
    }
}

#[cfg(test)]
mod tests {
    //! Goal: what is under way is what the link needs, whatever the link; no window stays closed, none swings. Method:
    //! links of two lanes in virtual time with a rate, a delay, and hiccups, loaded as a mover does.
    use super::*;
    use std::collections::VecDeque;

    const MOST: u64 = 8 << 20;
    const PIECE: u64 = PIECE_BYTES as u64;
    const SECOND: Nanos = 1_000_000_000;
    const MILLISECOND: Nanos = 1_000_000;

    struct Line {
        window: Window,
        /// Bytes per second, and how long an answer takes beside.
        rate: u64,
        delay: Nanos,
        piece: u64,
        now: Nanos,
        /// When the link has sent all that it was given.
        free: Nanos,
        flights: VecDeque<(Nanos, Nanos)>,
        under_way: u64,
        moved: u64,
        most_under_way: u64,
    }

    impl Line {
        fn new(rate: u64, delay: Nanos) -> Self {
            let (window, piece) = (Window::new(MOST), PIECE);
            let flights = VecDeque::new();
            Self { window, rate, delay, piece, now: 5, free: 0, flights, under_way: 0, moved: 0, most_under_way: 0 }
        }

        /// Sends up to so many bytes, as far as the window allows; returns what was sent.
        fn fill(&mut self, bytes: u64) -> u64 {
            let mut sent = 0;
            while sent < bytes && (self.under_way == 0 || self.window.admits(self.under_way, self.piece)) {
                self.under_way += self.piece;
                self.window.sent(self.piece, self.under_way, self.now);
                self.free = self.free.max(self.now) + self.piece * SECOND / self.rate;
                self.flights.push_back((self.now, self.free + self.delay));
                sent += self.piece;
            }
            self.most_under_way = self.most_under_way.max(self.under_way);
            sent
        }

        fn answer(&mut self) {
            let (sent, at) = self.flights.pop_front().expect("something is under way");
            self.now = self.now.max(at);
            self.under_way -= self.piece;
            self.moved += self.piece;
            self.window.answered(self.piece, sent, self.under_way, self.now);
        }

        /// Keeps it busy for so long; returns the share of the link that was used.
        fn run(&mut self, time: Nanos) -> f64 {
            let (until, began, moved) = (self.now + time, self.now, self.moved);
            self.most_under_way = 0;
            while self.now < until {
                self.fill(u64::MAX);
                self.answer();
            }
            (self.moved - moved) as f64 / self.rate as f64 / ((self.now - began) as f64 / 1e9)
        }

        /// What an urgent copy would wait for, at most.
        fn queued(&self) -> Nanos {
            self.most_under_way * SECOND / self.rate
        }
    }

    #[test]
    fn it_follows_the_link() {
        for (megabit, delay) in
            [(50, 0), (50, 1), (1000, 0), (1000, 1), (10_000, 0), (100_000, 0), (1000, 20), (10_000, 5)]
        {
            let mut line = Line::new(megabit * 125_000, delay * MILLISECOND + 100_000);
            line.run(SECOND);
            let used = line.run(10 * SECOND);
            assert!(used > 0.97, "{megabit} Mbit/s, {delay} ms: {used} of the link, {:?}", line.window);
            // Beside what is travelling: four milliseconds, or three pieces and a bit.
            let pieces = 7 * PIECE / 2 * SECOND / line.rate;
            let bound = (line.delay * 5 / 4 + pieces).max(5 * MILLISECOND);
            assert!(line.queued() <= bound, "{megabit} Mbit/s, {delay} ms: {} us queue", line.queued() / 1000);
        }
    }

    #[test]
    fn it_opens_within_a_few_round_trips() {
        let mut line = Line::new(4_000_000_000, 100_000);
        line.run(5 * MILLISECOND);
        assert_eq!(line.window.bytes, MOST, "{:?}", line.window);
    }

    #[test]
    fn a_link_that_changes_is_followed() {
        let mut line = Line::new(1_250_000_000, 100_000);
        line.run(SECOND);
        line.rate = 6_250_000;
        // What is under way has to go first.
        line.run(3 * SECOND);
        let used = line.run(SECOND);
        assert!(line.most_under_way <= 3 * PIECE && used > 0.95, "{used}, {:?}", line.window);
        line.rate = 1_250_000_000;
        line.run(200 * MILLISECOND);
        assert!(line.run(SECOND) > 0.97, "{:?}", line.window);
        // A longer way: found out although it never rests.
        line.delay = 3 * MILLISECOND;
        line.run(SECOND);
        assert!(line.run(SECOND) > 0.95, "{:?}", line.window);
        line.delay = 100_000;
        line.run(3 * SECOND);
        line.run(SECOND);
        assert!(line.queued() <= 6 * MILLISECOND, "{:?}", line.window);
    }

    #[test]
    fn ebbs_and_hiccups_close_nothing() {
        let mut line = Line::new(2_500_000_000, 100_000);
        line.run(SECOND);
        let open = line.window.bytes;
        for _ in 0..100 {
            // Seldom more than the window, and never soon after the last one.
            line.fill(4 * PIECE);
            while line.under_way > 0 {
                line.answer();
            }
            line.now += SECOND;
        }
        assert_eq!(line.window.bytes, open);
        let (mut sent, mut bursts) = (0, 0);
        while bursts < 100 {
            sent += line.fill((64 << 20) - sent);
            line.answer();
            if sent == 64 << 20 {
                (sent, bursts) = (0, bursts + 1);
                line.now += SECOND / 50;
                assert!(line.window.bytes >= open * 3 / 4, "{:?}", line.window);
            }
        }
        for _ in 0..100 {
            line.run(50 * MILLISECOND);
            // Neither end's threads run for ten milliseconds.
            line.free = line.free.max(line.now) + 10 * MILLISECOND;
            line.run(20 * MILLISECOND);
            assert!(line.window.bytes >= open / 2, "{:?}", line.window);
        }
        line.run(100 * MILLISECOND);
        assert!(line.window.bytes >= open * 3 / 4, "{:?}", line.window);
    }

    #[test]
    fn small_copies_and_small_limits() {
        let mut line = Line::new(1_000_000_000, 100_000);
        line.piece = 4096;
        line.run(SECOND);
        assert!((3_000_000..6_000_000).contains(&line.window.bytes), "{:?}", line.window);
        let mut window = Window::new(PIECE);
        assert!(!window.admits(PIECE, 1) && window.admits(0, PIECE));
        window.sent(PIECE, PIECE, 7);
        // No time has passed: that is no round.
        window.answered(PIECE, 7, 0, 7);
        window.sent(0, 0, 8);
        window.answered(0, 8, 0, u64::MAX);
        assert_eq!(window.bytes, PIECE);
    }
}
