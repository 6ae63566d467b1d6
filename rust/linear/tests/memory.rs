//! Goal: a product in steady state allocates nothing. Method: an allocator that counts what the product's threads ask for, in
//! a test program of its own.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::atomic::{AtomicUsize, Ordering};

use linear::{Kind, Level, Part, Rows, RowsMut, Threads, Weights, multiply};

struct Counting;

static ALLOCATIONS: AtomicUsize = AtomicUsize::new(0);

thread_local! {
    static COUNTED: Cell<bool> = const { Cell::new(false) };
}

// SAFETY: hands everything on to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if COUNTED.get() {
            ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        }
        // SAFETY: the caller's promise is the same.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: as above.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

#[test]
fn nothing_is_allocated_from_the_second_product_on() {
    let threads = Threads::new(2).expect("threads");
    let begun = AtomicUsize::new(0);
    threads.run(2, &|_| {
        // Waits until the other thread is here too.
        begun.fetch_add(1, Ordering::SeqCst);
        while begun.load(Ordering::SeqCst) < 2 {
            std::thread::yield_now();
        }
        COUNTED.set(true);
    });
    let (outputs, depth) = (100, 300);
    let w = vec![0.5; outputs * depth];
    for kind in [Kind::F32, Kind::Bf16] {
        let weights = Weights::pack(&[Part::F32(Rows::new(&w, outputs, depth))], kind, &threads).expect("memory");
        let (x, mut y) = (vec![1.0; 200 * depth], vec![0.0; 200 * outputs]);
        let mut product = |rows: usize| {
            let out = RowsMut::new(&mut y[..rows * outputs], rows, outputs);
            multiply(weights.packed(), Rows::new(&x[..rows * depth], rows, depth), out, &threads, Level::best());
        };
        product(200);
        let before = ALLOCATIONS.load(Ordering::Relaxed);
        for rows in (1..=200).chain([200, 1, 16]) {
            product(rows);
        }
        assert_eq!(ALLOCATIONS.load(Ordering::Relaxed), before, "{kind:?}");
        assert!(y.iter().all(|number| *number == 150.0));
    }
}
