//! Goal: norms, rotation and activation are right, and give the same bits at every level and on any number of threads.
//!
//! Method: the best level against f64, and the others against the best.

use kernels::{Bf16, Copied, Level, Norms, Number, Pages, RmsNorm, Rope, Strips, Swiglu, Threads};

fn numbers(count: usize, seed: u32) -> Vec<f32> {
    let mut state = seed;
    let mut next = || {
        state = state.wrapping_mul(1664525).wrapping_add(1013904223);
        (state >> 8) as f32 / 8388608.0 - 1.0
    };
    (0..count).map(|_| next() * 3.0).collect()
}

/// Results of all levels and some numbers of threads, which are alike: the one.
fn alike(compute: impl Fn(&Threads, Level) -> Vec<f32>) -> Vec<f32> {
    let expected = compute(&Threads::new(1).expect("threads"), Level::best());
    for level in Level::available() {
        for count in [1, 3] {
            let found = compute(&Threads::new(count).expect("threads"), *level);
            let same = found.iter().zip(&expected).all(|(one, other)| one.to_bits() == other.to_bits());
            assert!(same && found.len() == expected.len(), "{} with {count} threads", level.name());
        }
    }
    expected
}

fn close(found: &[f32], right: impl Iterator<Item = f64>) {
    for (found, right) in found.iter().zip(right) {
        assert!((f64::from(*found) - right).abs() < 2e-6 * (1.0 + right.abs()), "{found} is {right}");
    }
}

#[test]
fn a_norm_is_right() {
    for (rows, width) in [(1, 576), (70, 576), (3, 33), (2, 5)] {
        let (x, before, weight) = (numbers(rows * width, 1), numbers(rows * width, 2), numbers(width, 3));
        let found = alike(|threads, level| {
            let (mut x, mut residual) = (x.clone(), before.clone());
            let norm = RmsNorm {
                x: (x.as_ptr(), width),
                residual: (residual.as_mut_ptr(), width),
                weight: weight.as_ptr(),
                out: (x.as_mut_ptr(), width),
                rows,
                width,
                eps: 1e-5,
            };
            // SAFETY: the vectors are as large as is said, and nobody else uses them; here and below.
            unsafe { norm.compute(threads, level) };
            let sums = x.iter().copied().chain(residual.iter().copied());
            sums.collect()
        });
        let stream: Vec<f64> = x.iter().zip(&before).map(|(x, before)| f64::from(x + before)).collect();
        let normed = stream.chunks(width).flat_map(|row| {
            let scale = (row.iter().map(|x| x * x).sum::<f64>() / width as f64 + 1e-5).sqrt();
            row.iter().zip(&weight).map(move |(x, weight)| x / scale * f64::from(*weight)).collect::<Vec<_>>()
        });
        close(&found, normed.chain(stream.clone()));
    }
}

#[test]
fn an_activation_is_right() {
    for (rows, width) in [(1, 1536), (50, 700), (4, 3)] {
        let gate_up = numbers(2 * rows * width, 4);
        let found = alike(|threads, level| {
            let mut gate_up = gate_up.clone();
            let gate = (gate_up.as_mut_ptr(), 2 * width);
            let mut apart = vec![0.0_f32; rows * width];
            // SAFETY: as above.
            unsafe {
                let step = Swiglu { gate_up: (gate.0.cast_const(), gate.1), out: gate, rows, width };
                Swiglu { out: (apart.as_mut_ptr(), width), ..step }.compute(threads, level);
                step.compute(threads, level);
            }
            assert!(apart.chunks(width).zip(gate_up.chunks(2 * width)).all(|(apart, both)| *apart == both[..width]));
            gate_up
        });
        let right = gate_up.chunks(2 * width).flat_map(|row| {
            let (gate, up) = row.split_at(width);
            let gated = gate.iter().zip(up).map(|(gate, up)| {
                let (gate, up) = (f64::from(*gate), f64::from(*up));
                gate / (1.0 + (-gate).exp()) * up
            });
            gated.chain(up.iter().map(|up| f64::from(*up))).collect::<Vec<_>>()
        });
        close(&found, right);
    }
}

#[test]
fn heads_are_turned_and_written() {
    const HEADS: usize = 3;
    let (tokens, kv_heads, width, page_tokens, count) = (70, 2, 16, 4, 20);
    let row = (HEADS + 2 * kv_heads) * width;
    let (qkv, weights) = (numbers(tokens * row, 5), numbers(2 * width, 6));
    let angles = numbers(tokens * width / 2, 7);
    let (cosines, sines): (Vec<_>, Vec<_>) = angles.iter().map(|angle| (angle.cos(), angle.sin())).unzip();
    let slots: Vec<i64> = (0..tokens as i64).map(|token| if token % 9 == 0 { -1 } else { 79 - token }).collect();
    let found = alike(|threads, level| {
        let (mut qkv, mut pages) = (qkv.clone(), vec![9.0_f32; 2 * kv_heads * count * page_tokens * width]);
        let step = Rope::<f32, f32> {
            qkv: (qkv.as_mut_ptr(), row, width),
            tokens,
            heads: HEADS,
            pages: Pages {
                first: pages.as_mut_ptr(),
                values: kv_heads * count * page_tokens * width,
                head: count * page_tokens * width,
                page: page_tokens * width,
                token: width,
                heads: kv_heads,
                count,
                page_tokens,
                head_dim: width,
            },
            cosines: (cosines.as_ptr(), width / 2),
            sines: (sines.as_ptr(), width / 2),
            slots: slots.as_ptr(),
            norms: Some(Norms { query: weights.as_ptr(), key: weights[width..].as_ptr(), eps: 1e-6 }),
        };
        // SAFETY: as above.
        unsafe { step.compute(threads, level) };
        qkv.chunks(row).flat_map(|row| row[..HEADS * width].to_vec()).chain(pages).collect()
    });
    let turned = |token: usize, head: usize| {
        let from = &qkv[token * row + head * width..][..width];
        let weight = &weights[if head < HEADS { 0 } else { width }..][..width];
        let scale = (from.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>() / width as f64 + 1e-6).sqrt();
        let head: Vec<f64> =
            from.iter().zip(weight).map(|(x, weight)| f64::from(*x) / scale * f64::from(*weight)).collect();
        (0..width)
            .map(|index| {
                let angle = token * width / 2 + index % (width / 2);
                let (cosine, sine) = (f64::from(cosines[angle]), f64::from(sines[angle]));
                let sign = if index < width / 2 { -1.0 } else { 1.0 };
                head[index] * cosine + sign * head[(index + width / 2) % width] * sine
            })
            .collect::<Vec<_>>()
    };
    let mut pages = vec![9.0; 2 * kv_heads * count * page_tokens * width];
    for (token, slot) in slots.iter().enumerate().filter(|(_, slot)| **slot >= 0) {
        for head in 0..kv_heads {
            let place = |value: usize| ((value * kv_heads + head) * count * page_tokens + *slot as usize) * width;
            pages[place(0)..][..width].copy_from_slice(&turned(token, HEADS + head));
            let values = &qkv[token * row + (HEADS + kv_heads + head) * width..][..width];
            for (to, from) in pages[place(1)..].iter_mut().zip(values) {
                *to = f64::from(*from);
            }
        }
    }
    let queries = (0..tokens * HEADS).flat_map(|index| turned(index / HEADS, index % HEADS));
    close(&found, queries.chain(pages));
}

#[test]
fn bf16_is_what_f32_rounds_to() {
    let width = 100;
    let gate_up: Vec<Bf16> = numbers(2 * width, 8).into_iter().map(Bf16::narrow).collect();
    let mut halves = gate_up.clone();
    let mut wide: Vec<f32> = gate_up.iter().map(|number| number.widen()).collect();
    let threads = Threads::new(1).expect("threads");
    // SAFETY: as above.
    unsafe {
        let (half, full) = (halves.as_mut_ptr(), wide.as_mut_ptr());
        Swiglu { gate_up: (half, 2 * width), out: (half, 2 * width), rows: 1, width }.compute(&threads, Level::best());
        Swiglu { gate_up: (full, 2 * width), out: (full, 2 * width), rows: 1, width }.compute(&threads, Level::best());
    }
    assert!(halves.iter().zip(wide).all(|(half, wide)| *half == Bf16::narrow(wide)));
}

#[test]
fn pages_become_strips_and_come_back() {
    let (layers, heads, count, page_tokens, bytes) = (3, 2, 6, 4, 8);
    let strip = page_tokens * bytes;
    let pages: Vec<u8> = (0..layers * 2 * heads * count * strip).map(|index| (index * 31 % 251) as u8).collect();
    let named = [4_i64, 0, 5];
    let (mut strips, mut back) = (vec![0_u8; named.len() * layers * 2 * heads * strip], vec![0_u8; pages.len()]);
    let way = |pages: *mut u8, strips: *mut u8| Strips {
        pages,
        page_ways: [2 * heads * count * strip, heads * count * strip, count * strip, strip, bytes],
        strips,
        strip_ways: [layers * 2 * heads * strip, 2 * heads * strip, heads * strip, strip, bytes],
        layers,
        heads,
        page_tokens,
        bytes,
    };
    let threads = Threads::new(2).expect("threads");
    // SAFETY: the vectors are as large as is said; the first is only read.
    unsafe {
        way(pages.as_ptr().cast_mut(), strips.as_mut_ptr()).copy(&named, &threads, Copied::Gathered);
        way(back.as_mut_ptr(), strips.as_mut_ptr()).copy(&named, &threads, Copied::Scattered);
    }
    for (index, run) in pages.chunks(strip).enumerate() {
        let (place, page) = (index / count, index % count);
        let block = named.iter().position(|named| *named == page as i64);
        if let Some(block) = block {
            assert_eq!(&strips[(block * layers * 2 * heads + place) * strip..][..strip], run);
        }
        let expected = if block.is_some() { run.to_vec() } else { vec![0; strip] };
        assert_eq!(back[index * strip..][..strip], expected);
    }
}
