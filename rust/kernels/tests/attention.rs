//! Goal: attention is right, and a token's bits depend on nothing but what it sees.
//!
//! Method: against a plain loop in f64; then the same tokens as a whole prompt, in chunks, one by one, beside others, on
//! other numbers of threads and at every level, compared bit by bit.

use kernels::{Attention, Bf16, Level, Number, Pages, Plan, SEGMENT, Sequence, Threads, WIDEST_HEAD};

/// KV heads, query heads for each, head_dim, page_tokens.
#[derive(Clone, Copy)]
struct Shape {
    heads: usize,
    group: usize,
    width: usize,
    page_tokens: usize,
}

const SHAPES: [Shape; 4] = [
    Shape { heads: 3, group: 3, width: 64, page_tokens: 16 },
    Shape { heads: 2, group: 1, width: 20, page_tokens: 7 },
    Shape { heads: 1, group: 16, width: 80, page_tokens: 32 },
    Shape { heads: 1, group: 5, width: WIDEST_HEAD, page_tokens: 256 },
];

/// Tokens of some sequences: queries, keys and values of each, by position.
struct Text {
    shape: Shape,
    /// \[sequences\]\[length\]\[heads * group\]\[width\].
    queries: Vec<Vec<f32>>,
    pages: Vec<f32>,
    tables: Vec<Vec<i32>>,
    count: usize,
}

struct Random(u64);

impl Random {
    fn next(&mut self) -> f32 {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (self.0 >> 40) as f32 / 8388608.0 - 1.0
    }
}

impl Text {
    fn new(shape: Shape, lengths: &[usize], seed: u64) -> Self {
        let mut random = Random(seed);
        let needed: Vec<_> = lengths.iter().map(|length| length.div_ceil(shape.page_tokens)).collect();
        let count = needed.iter().sum::<usize>() + 1;
        // Each sequence's pages from the end to the front, and nobody's page 0; NaN wherever there is no token.
        let mut last = count as i32;
        let tables: Vec<Vec<i32>> = needed
            .iter()
            .map(|needed| {
                (0..*needed)
                    .map(|_| {
                        last -= 1;
                        last
                    })
                    .collect()
            })
            .collect();
        let mut pages = vec![f32::NAN; 2 * shape.heads * count * shape.page_tokens * shape.width];
        let mut text = Self { shape, queries: Vec::new(), pages: Vec::new(), tables, count };
        for (sequence, length) in lengths.iter().enumerate() {
            for position in 0..*length {
                for value in 0..2 {
                    for head in 0..shape.heads {
                        let first = text.place(sequence, position, value, head);
                        pages[first..first + shape.width].fill_with(|| random.next() * 2.0);
                    }
                }
            }
            let numbers = length * shape.heads * shape.group * shape.width;
            text.queries.push((0..numbers).map(|_| random.next() * 2.0).collect());
        }
        text.pages = pages;
        text
    }

    fn place(&self, sequence: usize, position: usize, value: usize, head: usize) -> usize {
        let Shape { heads, width, page_tokens, .. } = self.shape;
        let page = self.tables[sequence][position / page_tokens] as usize;
        (((value * heads + head) * self.count + page) * page_tokens + position % page_tokens) * width
    }

    /// Results of new tokens (sequence, first position, how many), one run after the other.
    fn attend<C: Number>(
        &self,
        runs: &[(usize, usize, usize)],
        window: Option<usize>,
        threads: usize,
        level: Level,
    ) -> Vec<f32> {
        let Shape { heads, group, width, page_tokens } = self.shape;
        let (wide, each) = (heads * group * width, self.tables.iter().map(Vec::len).max().unwrap_or(0));
        let (mut sequences, mut tables, mut query) = (Vec::new(), Vec::new(), Vec::new());
        for &(sequence, first, count) in runs {
            sequences.push(Sequence { row: query.len() / wide, count, length: first + count });
            query.extend_from_slice(&self.queries[sequence][first * wide..(first + count) * wide]);
            let mut table = self.tables[sequence].clone();
            table.resize(each, i32::MAX);
            tables.extend(table);
        }
        let mut pages: Vec<C> = self.pages.iter().map(|number| C::narrow(*number)).collect();
        let plan = Plan::new(&sequences, tables, each, window, group, (self.count, page_tokens));
        let step = Attention::<f32, C> {
            query: (query.as_ptr(), wide, width),
            out: (query.as_mut_ptr(), wide, width),
            rows: query.len() / wide,
            pages: Pages {
                first: pages.as_mut_ptr(),
                values: heads * self.count * page_tokens * width,
                head: self.count * page_tokens * width,
                page: page_tokens * width,
                token: width,
                heads,
                count: self.count,
                page_tokens,
                head_dim: width,
            },
        };
        let threads = Threads::new(threads).expect("threads");
        // SAFETY: both vectors are as large as is said, and nobody else uses them.
        unsafe { step.compute(&plan, &threads, level) };
        query
    }

    fn oracle(&self, sequence: usize, position: usize, window: Option<usize>) -> Vec<f64> {
        let Shape { heads, group, width, .. } = self.shape;
        let mut out = Vec::new();
        for head in 0..heads * group {
            let query = &self.queries[sequence][(position * heads * group + head) * width..][..width];
            let seen = (position + 1).saturating_sub(window.unwrap_or(usize::MAX))..position + 1;
            let row = |position: usize, value: usize| {
                &self.pages[self.place(sequence, position, value, head / group)..][..width]
            };
            let scores: Vec<f64> = seen
                .clone()
                .map(|position| {
                    let dot = query.iter().zip(row(position, 0)).map(|(q, k)| f64::from(*q) * f64::from(*k));
                    dot.sum::<f64>() / (width as f64).sqrt()
                })
                .collect();
            let largest = scores.iter().copied().fold(f64::MIN, f64::max);
            let weights: Vec<f64> = scores.iter().map(|score| (score - largest).exp()).collect();
            let total: f64 = weights.iter().sum();
            out.extend((0..width).map(|column| {
                let values = seen.clone().map(|position| f64::from(row(position, 1)[column]));
                values.zip(&weights).map(|(value, weight)| value * weight).sum::<f64>() / total
            }));
        }
        out
    }
}

const LENGTH: usize = 2 * SEGMENT + 61;

#[test]
fn attention_is_right() {
    for shape in SHAPES {
        let text = Text::new(shape, &[LENGTH, 3, 40], 1);
        for window in [None, Some(1), Some(33), Some(SEGMENT + 5)] {
            let runs = [(0, LENGTH - 90, 90), (1, 0, 3), (2, 39, 1)];
            let found = text.attend::<f32>(&runs, window, 2, Level::best());
            let right = runs.iter().flat_map(|(sequence, first, count)| {
                (*first..first + count).flat_map(|position| text.oracle(*sequence, position, window))
            });
            for (found, right) in found.iter().zip(right) {
                assert!((f64::from(*found) - right).abs() < 2e-6 * (1.0 + right.abs()), "{found} is {right}");
            }
        }
    }
}

#[test]
fn a_token_depends_on_nothing_but_what_it_sees() {
    for (shape, window) in SHAPES.into_iter().zip([None, Some(70), None, Some(SEGMENT + 9)]) {
        let text = Text::new(shape, &[LENGTH, 130], 2);
        let whole = text.attend::<f32>(&[(0, 0, LENGTH)], window, 1, Level::best());
        let wide = shape.heads * shape.group * shape.width;
        assert!(whole.iter().all(|number| number.is_finite()));
        let same = |found: &[f32], first: usize, case: &str| {
            let expected = &whole[first * wide..][..found.len()];
            assert!(found.iter().zip(expected).all(|(one, other)| one.to_bits() == other.to_bits()), "{case}");
        };
        for level in Level::available() {
            for threads in [1, 2, 3] {
                // Without vectors a product takes a hundred times as long: once, with the least heads.
                if *level == Level::Scalar && (threads != 2 || shape.width > 20) {
                    continue;
                }
                // Chunks, alone and between others' tokens; single tokens, whose segments are shared out.
                for (first, count) in [(0, 100), (100, 1), (101, LENGTH - 101), (SEGMENT - 1, 2), (LENGTH - 1, 1)] {
                    let alone = text.attend::<f32>(&[(0, first, count)], window, threads, *level);
                    same(&alone, first, "alone");
                    let runs = [(1, 20, 110), (0, first, count), (1, 129, 1)];
                    let beside = text.attend::<f32>(&runs, window, threads, *level);
                    same(&beside[110 * wide..][..count * wide], first, "beside others");
                }
                let many: Vec<_> = (LENGTH - 20..LENGTH).map(|position| (0, position, 1)).collect();
                same(&text.attend::<f32>(&many, window, threads, *level), LENGTH - 20, "one by one");
            }
        }
    }
}

#[test]
fn pages_of_bf16_are_widened() {
    let mut text = Text::new(SHAPES[0], &[LENGTH], 3);
    let halves = text.attend::<Bf16>(&[(0, 0, LENGTH)], None, 2, Level::best());
    for number in &mut text.pages {
        *number = Bf16::narrow(*number).widen();
    }
    assert_eq!(halves, text.attend::<f32>(&[(0, 0, LENGTH)], None, 1, Level::best()));
}

#[test]
fn who_is_not_there_and_rows_of_nobody_are_zero() {
    let shape = SHAPES[0];
    let wide = shape.heads * shape.group * shape.width;
    let mut query = vec![1.0_f32; 3 * wide];
    let mut pages = vec![f32::NAN; 2 * shape.heads * shape.page_tokens * shape.width];
    let sequences = [Sequence { row: 0, count: 2, length: 0 }];
    let plan = Plan::new(&sequences, vec![-1], 1, None, shape.group, (1, shape.page_tokens));
    let step = Attention::<f32, f32> {
        query: (query.as_ptr(), wide, shape.width),
        out: (query.as_mut_ptr(), wide, shape.width),
        rows: 3,
        pages: Pages {
            first: pages.as_mut_ptr(),
            values: pages.len() / 2,
            head: shape.page_tokens * shape.width,
            page: shape.page_tokens * shape.width,
            token: shape.width,
            heads: shape.heads,
            count: 1,
            page_tokens: shape.page_tokens,
            head_dim: shape.width,
        },
    };
    // SAFETY: as above.
    unsafe { step.compute(&plan, &Threads::new(2).expect("threads"), Level::best()) };
    assert!(query.iter().all(|number| *number == 0.0));
}
