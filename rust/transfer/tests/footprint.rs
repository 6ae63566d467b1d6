//! What the books over a cached block take in memory, beside its strips' checksums.
//!
//! Goal: a node with small blocks does not spend its memory on books, and an arena that could hold many blocks costs nothing
//! before it does: 128 bytes at most with the policy `cost`, and a dozen more where owners are told apart. Method: an
//! allocator that counts; a pool over an arena, filled with prefixes as a store fills it.

use std::alloc::{GlobalAlloc, Layout as Bytes, System};
use std::sync::atomic::{AtomicIsize, Ordering};

use pyengine_transfer::memory::Arena;
use pyengine_transfer::messages::GrantMode;
use pyengine_transfer::pool::account::{Accounts, Quota};
use pyengine_transfer::pool::policy::{DEFAULT, cost::Costs};
use pyengine_transfer::pool::{Granting, Holder, Pool, Wish};
use pyengine_transfer::types::{BlockKey, Layout, Owner, Tag};

/// Bytes that are allocated now.
static TAKEN: AtomicIsize = AtomicIsize::new(0);

struct Counting;

// SAFETY: all is done by the system's allocator, and counted.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, bytes: Bytes) -> *mut u8 {
        TAKEN.fetch_add(bytes.size() as isize, Ordering::Relaxed);
        // SAFETY: the caller's promises are those of the system's allocator.
        unsafe { System.alloc(bytes) }
    }

    unsafe fn dealloc(&self, at: *mut u8, bytes: Bytes) {
        TAKEN.fetch_sub(bytes.size() as isize, Ordering::Relaxed);
        // SAFETY: as above.
        unsafe { System.dealloc(at, bytes) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const PREFIX: u64 = 128;

#[test]
fn books_over_a_block_are_small() {
    for (quotas, limit) in [(vec![], 128), (vec![Quota::default()], 140)] {
        let each = books(&quotas);
        println!("{each} bytes for the books over a block, policy {}, quotas {}", DEFAULT.name, quotas.len());
        assert!(each <= limit, "{each} bytes for the books over a block");
    }
}

fn books(quotas: &[Quota]) -> isize {
    let layout = Layout { strips: 70, strip_bytes: 64 };
    let before = TAKEN.load(Ordering::Relaxed);
    // Room for 16 million blocks: no memory but a pointer per 1024 of them.
    let arena = Arena::sparse(128 << 30, layout).expect("it is sparse");
    let mut pool = Pool::new(arena.clone(), 0, 4, 16, DEFAULT.make(&Costs::default()));
    pool.tell_apart(Accounts::new(quotas), 8192, || DEFAULT.make(&Costs::default()));
    let empty = TAKEN.load(Ordering::Relaxed) - before;
    assert!(arena.slots() > 15_000_000);
    assert!(empty < 1 << 20, "an empty arena of {} slots takes {empty} bytes", arena.slots());

    // As stores grow: by doubling.
    let blocks = 1 << 17;
    pool.set_limit(blocks + 1);
    for number in 0..u64::from(blocks) / PREFIX {
        let keys = (0..PREFIX).map(|position| {
            let mut key = [0; 16];
            key[..8].copy_from_slice(&(number << 32 | position).wrapping_mul(0x9E37_79B9_7F4A_7C15).to_le_bytes());
            key[8..].copy_from_slice(&number.to_le_bytes());
            BlockKey(key)
        });
        let owner = Owner { namespace: 1, tenant: number % 3 };
        let wish = Wish { keys: keys.collect(), private: false, parent: BlockKey([0; 16]), position: 0, owner };
        let holder = Holder { client: Some(1), tag: Tag { request: number, attempt: 0, worker: 1 } };
        let granting = pool.grant_with(holder, wish, GrantMode::Wait, &mut |pool, lack| {
            let count = lack.wanted.max(pool.size() as usize).min((blocks + 1 - pool.size()) as usize);
            pool.grow(count as u32);
        });
        let Granting::Held(slots) = granting else { panic!("{granting:?}") };
        for (index, slot) in (0..).zip(slots) {
            // What a transport does.
            drop(arena.begin_write(slot.slot, 0..70).expect("open"));
            pool.commit(holder, index, None).expect("written");
        }
        pool.release(holder);
        // As an engine does after every input.
        pool.take_changes();
        pool.end(holder.tag);
    }
    let each = (TAKEN.load(Ordering::Relaxed) - before - empty) / blocks as isize;
    pool.check();
    assert_eq!(pool.occupancy().cached, blocks);
    each
}
