//! Products of each level, the fastest of many: `product ROWS OUT IN [THREADS] [MATRICES]`.
use linear::{Kind, Level, Part, Rows, RowsMut, Threads, Weights, multiply};
use std::time::Instant;

fn main() {
    let arguments: Vec<usize> = std::env::args().skip(1).map(|word| word.parse().expect("a number")).collect();
    let (rows, outputs, depth) = (arguments[0], arguments[1], arguments[2]);
    let threads = Threads::new(arguments.get(3).copied().unwrap_or(1)).expect("threads");
    let matrices = arguments.get(4).copied().unwrap_or(1);
    let numbers = |count: usize, seed: u32| -> Vec<f32> {
        let mut state = seed;
        (0..count)
            .map(|_| {
                state = state.wrapping_mul(1664525).wrapping_add(1013904223);
                (state >> 8) as f32 / 16777216.0 - 0.5
            })
            .collect()
    };
    let x = numbers(rows * depth, 1);
    let w = numbers(outputs * depth, 2);
    let mut y = vec![0.0; rows * outputs];
    for kind in [Kind::F32, Kind::Bf16] {
        let start = Instant::now();
        let all: Vec<_> = (0..matrices)
            .map(|_| Weights::pack(&[Part::F32(Rows::new(&w, outputs, depth))], kind, &threads).expect("memory"))
            .collect();
        let packing = start.elapsed().as_secs_f64() / matrices as f64;
        for &level in Level::available().iter().skip(1) {
            let flops = 2.0 * (rows * outputs * depth * matrices) as f64;
            let rounds = ((4e10 / flops) as usize).clamp(5, 300);
            let mut best = f64::MAX;
            for _ in 0..rounds {
                let start = Instant::now();
                for weights in &all {
                    multiply(
                        weights.packed(),
                        Rows::new(&x, rows, depth),
                        RowsMut::new(&mut y, rows, outputs),
                        &threads,
                        level,
                    );
                }
                best = best.min(start.elapsed().as_secs_f64());
            }
            let bytes = all.iter().map(Weights::bytes).sum::<usize>() as f64;
            println!(
                "{rows}x{outputs}x{depth} {kind:?} {} {:.1} us {:.1} GFLOP/s {:.1} GB/s pack {:.2} ms",
                level.name(),
                best * 1e6 / matrices as f64,
                flops / best / 1e9,
                bytes / best / 1e9,
                packing * 1e3
            );
        }
    }
}
