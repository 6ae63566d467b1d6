//! Goal: each part is done once, whoever calls, and nothing is left behind. Method: parts that count themselves, callers that
//! meet, parts that panic; no clock decides anything.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};

use linear::Threads;

fn counts(parts: usize) -> Vec<AtomicUsize> {
    (0..parts).map(|_| AtomicUsize::new(0)).collect()
}

fn all_once(counts: &[AtomicUsize]) -> bool {
    counts.iter().all(|count| count.load(Ordering::Relaxed) == 1)
}

#[test]
fn each_part_is_done_once() {
    for count in 1..=5 {
        let threads = Threads::new(count).expect("threads");
        assert_eq!(threads.count(), count);
        for parts in (0..200).chain([1000, 10_000]) {
            let done = counts(parts);
            threads.run(parts, &|part| {
                done[part].fetch_add(1, Ordering::Relaxed);
            });
            assert!(all_once(&done), "{parts} parts, {count} threads");
        }
    }
}

#[test]
fn helpers_sleep_and_wake() {
    let threads = Threads::new(3).expect("threads");
    // A part waits until another thread has begun one, so helpers have to come, also after they have gone to sleep.
    for _ in 0..20 {
        let begun = AtomicUsize::new(0);
        threads.run(2, &|_| {
            begun.fetch_add(1, Ordering::SeqCst);
            while begun.load(Ordering::SeqCst) < 2 {
                std::thread::yield_now();
            }
        });
        std::thread::sleep(std::time::Duration::from_millis(2));
    }
}

#[test]
fn callers_that_meet_do_not_wait_for_each_other() {
    let threads = Threads::new(2).expect("threads");
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for parts in 0..300 {
                    let done = counts(parts);
                    threads.run(parts, &|part| {
                        done[part].fetch_add(1, Ordering::Relaxed);
                    });
                    assert!(all_once(&done));
                }
            });
        }
    });
    // From within a part, too.
    let done = counts(64);
    threads.run(8, &|outer| {
        threads.run(8, &|inner| {
            done[8 * outer + inner].fetch_add(1, Ordering::Relaxed);
        });
    });
    assert!(all_once(&done));
}

#[test]
fn a_panic_reaches_the_caller_and_harms_nobody_else() {
    let threads = Threads::new(2).expect("threads");
    for bad in 0..40 {
        let outcome = catch_unwind(AssertUnwindSafe(|| {
            threads.run(40, &|part| {
                // Silent: the hook that prints is not called.
                if part == bad {
                    std::panic::resume_unwind(Box::new(part));
                }
            });
        }));
        assert!(outcome.is_err(), "part {bad}");
        let done = counts(40);
        threads.run(40, &|part| {
            done[part].fetch_add(1, Ordering::Relaxed);
        });
        assert!(all_once(&done), "after part {bad}");
    }
}
