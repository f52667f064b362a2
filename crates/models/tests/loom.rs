//! Runs the models.

#[test]
fn every_message_wakes_the_worker() {
    models::every_message_wakes_the_worker();
}

#[test]
fn callers_of_an_ending_worker_return() {
    models::callers_of_an_ending_worker_return();
}

#[test]
fn every_answer_wakes_the_worker() {
    models::every_answer_wakes_the_worker();
}

#[test]
fn held_range_is_its_holders_alone() {
    models::held_range_is_its_holders_alone();
}

#[test]
fn closed_disk_is_its_closers_alone() {
    models::closed_disk_is_its_closers_alone();
}

#[test]
fn bucket_is_charged_at_its_present_rate() {
    models::bucket_is_charged_at_its_present_rate();
}

#[test]
fn range_is_never_a_mixture_of_two_mappings() {
    models::range_is_never_a_mixture_of_two_mappings();
}

#[test]
fn counts_grow_and_are_exact_when_the_owner_has_ended() {
    models::counts_grow_and_are_exact_when_the_owner_has_ended();
}

#[test]
fn lookup_never_combines_words_of_two_clusters() {
    models::lookup_never_combines_words_of_two_clusters();
}
