from riddles import Riddles


def test_a_right_answer_is_worth_more_than_a_wrong_one():
    environment = Riddles(Riddles.Config(), tokenizer=None)
    for problem in environment.training_problems():
        right, wrong = environment.gold_response(problem), environment.wrong_response(problem)
        assert environment.get_reward(right, problem.golden, "stop") == 1.0
        assert environment.get_reward(wrong, problem.golden, "stop") == 0.0


def test_nothing_held_out_is_trained_on():
    environment = Riddles(Riddles.Config(), tokenizer=None)
    held_out = {problem.prompt for problem in environment.evaluation_problems()["held_out"]}
    assert not held_out & {problem.prompt for problem in environment.training_problems()}
