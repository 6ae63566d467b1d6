//! Goal: a product is right, and a row of it depends on nothing but that row and the weights. Method: random shapes, odd ones
//! above all, against sums in f64 with a bound from the theory of rounding; and bit by bit against the order of summation
//! that the crate promises, which is written down here a second time, plainly. So all levels and all numbers of threads give
//! the same bits as one definition, and thereby as each other.

use linear::{Bf16, CHUNK, Error, Kind, Level, Part, Rows, RowsMut, Threads, Weights, multiply};
use proptest::prelude::*;

/// Numbers without a pattern, between -1 and 1.
fn numbers(count: usize, seed: u64) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1 << 23) as f32 - 1.0
    };
    std::iter::repeat_with(next).take(count).collect()
}

/// One number of the product, in the order that is promised.
fn promised(x: &[f32], weights: &[f32]) -> f32 {
    let mut total: Option<f32> = None;
    for (x, weights) in x.chunks(CHUNK).zip(weights.chunks(CHUNK)) {
        let sum = x.iter().zip(weights).fold(0.0_f32, |sum, (x, weight)| x.mul_add(*weight, sum));
        total = Some(total.map_or(sum, |total| total + sum));
    }
    total.unwrap_or(0.0)
}

fn rounded(numbers: &[f32]) -> Vec<f32> {
    numbers.iter().map(|number| f32::from(Bf16::from(*number))).collect()
}

fn product(weights: &Weights, x: &[f32], rows: usize, threads: &Threads, level: Level) -> Vec<f32> {
    // What is not written stays NaN and is found.
    let mut y = vec![f32::NAN; rows * weights.packed().outputs()];
    let out = RowsMut::new(&mut y, rows, weights.packed().outputs());
    multiply(weights.packed(), Rows::new(x, rows, weights.packed().depth()), out, threads, level);
    y
}

fn bits(numbers: &[f32]) -> Vec<u32> {
    // Zero has two signs: sums of nothing but zeros may have either.
    numbers.iter().map(|number| (number + 0.0).to_bits()).collect()
}

/// All of it for one shape.
fn check(rows: usize, outputs: usize, depth: usize, kind: Kind, threads: &[Threads]) {
    let (x, w) = (numbers(rows * depth, 1), numbers(outputs * depth, 2));
    let weights = Weights::pack(&[Part::F32(Rows::new(&w, outputs, depth))], kind, &threads[0]).expect("memory");
    let w = if kind == Kind::F32 { w } else { rounded(&w) };
    let mut expected = Vec::new();
    for row in 0..rows {
        let x = &x[row * depth..][..depth];
        for output in 0..outputs {
            let w = &w[output * depth..][..depth];
            let sum = promised(x, w);
            let exact: f64 = x.iter().zip(w).map(|(x, w)| f64::from(*x) * f64::from(*w)).sum();
            let size: f64 = x.iter().zip(w).map(|(x, w)| f64::from(*x * *w).abs()).sum();
            // Each product goes through at most a chunk's additions and then one per chunk.
            let roundings = (depth.min(CHUNK) + depth.div_ceil(CHUNK)) as f64;
            let bound = roundings * f64::from(f32::EPSILON) * size + f64::from(f32::MIN_POSITIVE);
            assert!((f64::from(sum) - exact).abs() <= bound, "{sum} is not {exact} ({rows} x {outputs} x {depth})");
            expected.push(sum);
        }
    }
    for level in Level::available() {
        for threads in threads {
            let y = product(&weights, &x, rows, threads, *level);
            assert_eq!(
                bits(&y),
                bits(&expected),
                "{rows} x {outputs} x {depth}, {kind:?}, {level:?}, {} threads",
                threads.count()
            );
        }
    }
}

fn all_threads() -> Vec<Threads> {
    (1..=4).map(|count| Threads::new(count).expect("threads")).collect()
}

fn shape() -> impl Strategy<Value = (usize, usize, usize)> {
    // Around the edges of tiles (6, 12), panels (32), chunks (192) and blocks (96).
    let rows = prop_oneof![4 => 0..34_usize, 1 => 90..110_usize];
    let outputs = prop_oneof![3 => 0..100_usize, 1 => 120..140_usize];
    let depth = prop_oneof![3 => 0..100_usize, 2 => 185..200_usize, 1 => 380..390_usize];
    (rows, outputs, depth)
}

fn kind() -> impl Strategy<Value = Kind> {
    prop_oneof![Just(Kind::F32), Just(Kind::Bf16)]
}

/// Without a column there is nothing to read, and no memory to read it from: every number is a sum of nothing.
#[test]
fn weights_without_a_column_give_zeros() {
    for kind in [Kind::F32, Kind::Bf16] {
        check(3, 40, 0, kind, &all_threads());
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn every_level_and_number_of_threads_gives_the_promised_bits((rows, outputs, depth) in shape(), kind in kind()) {
        thread_local!(static THREADS: Vec<Threads> = all_threads());
        THREADS.with(|threads| check(rows, outputs, depth, kind, threads));
    }

    #[test]
    fn a_row_does_not_depend_on_those_beside_it(
        rows in 2..40_usize, outputs in 1..80_usize, depth in 1..400_usize, kind in kind(),
    ) {
        let threads = Threads::new(2).expect("threads");
        let (x, w) = (numbers(rows * depth, 3), numbers(outputs * depth, 4));
        let weights = Weights::pack(&[Part::F32(Rows::new(&w, outputs, depth))], kind, &threads).expect("memory");
        let together = product(&weights, &x, rows, &threads, Level::best());
        for (row, x) in x.chunks(depth).enumerate() {
            let alone = product(&weights, x, 1, &threads, Level::best());
            prop_assert_eq!(bits(&alone), bits(&together[row * outputs..][..outputs]));
        }
    }

    #[test]
    fn parts_are_one_above_the_other(heights in prop::collection::vec(0..50_usize, 0..5), depth in 1..70_usize, kind in kind()) {
        let threads = Threads::new(1).expect("threads");
        let outputs = heights.iter().sum::<usize>();
        let w = numbers(outputs * depth, 5);
        let halves: Vec<_> = w.iter().map(|number| Bf16::from(*number)).collect();
        let (mut parts, mut first) = (Vec::new(), 0);
        for (index, height) in heights.iter().enumerate() {
            let range = first * depth..(first + height) * depth;
            parts.push(match index % 2 {
                0 => Part::F32(Rows::new(&w[range], *height, depth)),
                _ => Part::Bf16(Rows::new(&halves[range], *height, depth)),
            });
            first += height;
        }
        let weights = Weights::pack(&parts, kind, &threads).expect("memory");
        let x = numbers(3 * weights.packed().depth(), 6);
        let y = product(&weights, &x, 3, &threads, Level::best());
        let mut expected = Vec::new();
        for x in x.chunks(depth) {
            let mut first = 0;
            for (index, height) in heights.iter().enumerate() {
                for w in w[first * depth..(first + height) * depth].chunks(depth) {
                    let halved = index % 2 == 1 || kind == Kind::Bf16;
                    expected.push(promised(x, &if halved { rounded(w) } else { w.to_vec() }));
                }
                first += height;
            }
        }
        prop_assert_eq!(bits(&y), bits(&expected));
    }

    #[test]
    fn the_nearest_bf16_is_chosen(bits in any::<u32>()) {
        let number = f32::from_bits(bits);
        let half = f32::from(Bf16::from(number));
        if number.is_nan() {
            prop_assert!(half.is_nan());
        } else {
            let (below, above) = (f32::from_bits(bits & 0xFFFF_0000), f32::from_bits((bits & 0xFFFF_0000).wrapping_add(0x1_0000)));
            // In f64, and with infinity as the power of two that would follow.
            let wide = |number: f32| if number.is_infinite() { 2_f64.powi(128).copysign(number.into()) } else { number.into() };
            let (down, up) = (wide(number) - wide(below), wide(above) - wide(number));
            let even = if bits & 0x1_0000 == 0 { below } else { above };
            let nearest = match down.abs().total_cmp(&up.abs()) {
                std::cmp::Ordering::Less => below,
                std::cmp::Ordering::Equal => even,
                std::cmp::Ordering::Greater => above,
            };
            prop_assert_eq!(half.to_bits(), if number.is_infinite() { bits } else { nearest.to_bits() });
        }
    }
}

#[test]
fn many_rows_are_computed_in_blocks() {
    // More blocks than one, and a depth at which the packed rows are more than a thread keeps.
    check(300, 40, 200, Kind::F32, &all_threads()[1..3]);
    let threads = Threads::new(2).expect("threads");
    let (rows, depth) = (50, 100_000);
    let (x, w) = (numbers(rows * depth, 7), numbers(3 * depth, 8));
    let weights = Weights::pack(&[Part::F32(Rows::new(&w, 3, depth))], Kind::F32, &threads).expect("memory");
    let y = product(&weights, &x, rows, &threads, Level::best());
    let expected: Vec<_> = x.chunks(depth).flat_map(|x| w.chunks(depth).map(|w| promised(x, w))).collect();
    assert_eq!(bits(&y), bits(&expected));
}

#[test]
fn rows_may_lie_apart() {
    let threads = Threads::new(1).expect("threads");
    let (rows, outputs, depth, gap) = (5, 37, 45, 11);
    let (x, w) = (numbers(rows * (depth + gap), 9), numbers(outputs * depth, 10));
    let mut y = vec![7.0; rows * (outputs + gap)];
    let weights = Weights::pack(&[Part::F32(Rows::new(&w, outputs, depth))], Kind::F32, &threads).expect("memory");
    // SAFETY: both buffers hold `rows` rows, each with a gap behind it.
    let (from, to) = unsafe {
        (
            Rows::from_raw(x.as_ptr(), rows, depth, depth + gap),
            RowsMut::from_raw(y.as_mut_ptr(), rows, outputs, outputs + gap),
        )
    };
    multiply(weights.packed(), from, to, &threads, Level::best());
    for (x, y) in x.chunks(depth + gap).zip(y.chunks(outputs + gap)) {
        let expected: Vec<_> = w.chunks(depth).map(|w| promised(&x[..depth], w)).collect();
        assert_eq!(bits(&y[..outputs]), bits(&expected));
        assert_eq!(y[outputs..], [7.0; 11], "nothing beside the result is written");
    }
}

#[test]
fn what_is_not_finite_stays_in_its_row_and_column() {
    let threads = Threads::new(2).expect("threads");
    let (rows, outputs, depth) = (14, 70, 400);
    let (mut x, mut w) = (numbers(rows * depth, 11), numbers(outputs * depth, 12));
    x[3 * depth + 200] = f32::NAN;
    w[65 * depth + 399] = f32::INFINITY;
    let weights = Weights::pack(&[Part::F32(Rows::new(&w, outputs, depth))], Kind::F32, &threads).expect("memory");
    let y = product(&weights, &x, rows, &threads, Level::best());
    for (index, number) in y.iter().enumerate() {
        assert_eq!(number.is_finite(), index / outputs != 3 && index % outputs != 65, "{index}");
    }
}

#[test]
fn parts_of_unequal_width_are_refused() {
    let threads = Threads::new(1).expect("threads");
    let w = numbers(60, 13);
    let parts = [Part::F32(Rows::new(&w, 6, 10)), Part::F32(Rows::new(&w, 10, 6))];
    assert_eq!(Weights::pack(&parts, Kind::F32, &threads).unwrap_err(), Error::Widths(10, 6));
}
