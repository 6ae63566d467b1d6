//! Attention of one layer, the fastest of many: `attention SEQUENCES BEFORE NEW [THREADS]`, with SmolLM2's heads.
use kernels::{Attention, Level, Pages, Plan, Sequence, Threads};
use std::time::Instant;

fn main() {
    let arguments: Vec<usize> = std::env::args().skip(1).map(|word| word.parse().expect("a number")).collect();
    let (sequences, before, new) = (arguments[0], arguments[1], arguments[2]);
    let threads = Threads::new(arguments.get(3).copied().unwrap_or(1)).expect("threads");
    let (heads, group, width, page_tokens) = (3, 3, 64, 16);
    let each = (before + new).div_ceil(page_tokens);
    let (pages, rows) = (each * sequences, new * sequences);
    // As many layers as SmolLM2 has: what a layer reads is not in a cache from the layer before.
    let mut kv = vec![0.5_f32; 30 * 2 * heads * pages * page_tokens * width];
    let mut query = vec![0.25_f32; rows * heads * group * width];
    let all: Vec<_> =
        (0..sequences).map(|index| Sequence { row: index * new, count: new, length: before + new }).collect();
    let plan = Plan::new(&all, (0..pages as i32).collect(), each, None, group, (pages, page_tokens));
    let layer = kv.len() / 30;
    for &level in Level::available().iter().skip(1) {
        let mut best = f64::MAX;
        for _ in 0..5 {
            let start = Instant::now();
            for kv in kv.chunks_mut(layer) {
                let step = Attention::<f32, f32> {
                    query: (query.as_ptr(), heads * group * width, width),
                    out: (query.as_mut_ptr(), heads * group * width, width),
                    rows,
                    pages: Pages {
                        first: kv.as_mut_ptr(),
                        values: layer / 2,
                        head: pages * page_tokens * width,
                        page: page_tokens * width,
                        token: width,
                        heads,
                        count: pages,
                        page_tokens,
                        head_dim: width,
                    },
                };
                // SAFETY: both vectors are as large as is said, and nobody else uses them.
                unsafe { step.compute(&plan, &threads, level) };
            }
            best = best.min(start.elapsed().as_secs_f64());
        }
        let seen = new as f64 * (before as f64 + (new as f64 + 1.0) / 2.0);
        let flops = 4.0 * seen * (sequences * heads * group * width * 30) as f64;
        let (gigaflops, gigabytes) = (flops / best / 1e9, (kv.len() * 4) as f64 / best / 1e9);
        println!("{} {:.3} ms {gigaflops:.1} GFLOP/s {gigabytes:.1} GB/s of KV", level.name(), best * 1e3);
    }
}
