//! Job files: no text causes a panic, and every message names the file.

use bench::driver::Subject;
use bench::job::{HONOURED, Job, JobContext, amount, bytes, duration, parse};
use bench::workload::{Extent, Generator};
use proptest::prelude::*;

/// Lines similar to options, with values similar to valid ones.
fn lines() -> impl Strategy<Value = String> {
    let option = prop::sample::select(HONOURED);
    let value = prop_oneof![
        "[0-9]{1,22}[kmgtpKi%]{0,3}",
        "[0-9kmg/:,.-]{0,24}",
        "(zipf|pareto|normal|random|zoned|zoned_abs):[0-9./:]{0,6}",
        "[a-z0-9_-]{0,12}",
        any::<String>(),
    ];
    let line = (option, value).prop_map(|(option, value)| format!("{option}={value}\n"));
    prop::collection::vec(line, 0..12)
        .prop_map(|lines| format!("[global]\n[a]\n{}", lines.concat()))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn no_text_panics(text in any::<String>(), lines in lines()) {
        for text in [text, lines] {
            match JobContext::none(|none| parse("some.fio", &text, &Job::default(), none)) {
                Ok(jobs) => {
                    for job in jobs {
                        for capacity in [0, 511, 1 << 20, u64::MAX] {
                            let generator = Generator::new(&job, 3, Extent {
                                capacity,
                                block_size: 512,
                                shared_by: 2,
                                cuts: capacity > 511,
                            });
                            if let Ok(generator) = generator {
                                for io in generator.take(20) {
                                    prop_assert!(io.offset <= capacity - u64::from(io.length));
                                }
                            }
                        }
                    }
                }
                Err(mistakes) => {
                    for mistake in mistakes.0 {
                        prop_assert!(mistake.to_string().starts_with("some.fio"));
                    }
                }
            }
        }
    }

    #[test]
    fn no_value_panics(text in any::<String>(), number in "[0-9]{1,30}[kKmgtpib%.smhdu]{0,4}") {
        for text in [&text, &number] {
            let _any = (bytes(text), amount(text), duration(text, std::time::Duration::from_secs(1)));
            let _any = Subject::parse(text);
        }
    }
}

fn contributed(name: &str) -> Vec<Job> {
    let path = format!("{}/../../contrib/jobs/{name}", env!("CARGO_MANIFEST_DIR"));
    let text = std::fs::read_to_string(&path).expect("the file");
    JobContext::none(|none| parse(name, &text, &Job::default(), none)).expect("its jobs")
}

#[test]
fn the_job_files_of_the_studies_mean_what_they_say() {
    let jobs = contributed("four-disks.fio");
    let [job] = &jobs[..] else {
        panic!("{} jobs", jobs.len());
    };
    assert_eq!(
        job.filenames,
        ["/dev/sda", "/dev/sdb", "/dev/sdc", "/dev/sdd"]
    );
    assert_eq!((job.iodepth, job.loops), (4, 100));
    assert_eq!((job.smallest(), job.largest()), (4096, 65_536));
    assert_eq!(job.pattern.read_percent, 50);
    assert!(job.logs.any() && job.pattern.random);

    let jobs = contributed("eight-disks.fio");
    assert_eq!(jobs.len(), 8);
    for (job, letter) in jobs.iter().zip('b'..) {
        assert_eq!(job.filenames, [format!("/dev/sd{letter}")]);
        assert_eq!(
            (job.iodepth, job.smallest(), job.largest()),
            (1, 4096, 4096)
        );
        assert_eq!(job.pattern.read_percent, 100);
        assert!(job.pattern.random && !job.stonewall);
    }
}
